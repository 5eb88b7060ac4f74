"""The record of a choice's verifications, kept for requests that ask for it."""

from array import array
from typing import TYPE_CHECKING

from specwire.messages import DraftReport

if TYPE_CHECKING:
    from .sequence import Sequence

_NO_SCORE, _NO_SCORES = array("f", [float("nan")]), array("f")


class DraftLog:
    """Grows by a few numbers a step."""

    __slots__ = ("_report",)

    def __init__(self) -> None:
        self._report = DraftReport([], [], [])

    def add(self, sequence: "Sequence", drafts: list[int], num_accepted: int) -> None:
        """Notes one verification; call it before its tokens are committed, while what the drafter sent is still in its slot."""
        place = sequence.draft_slot
        scores = _NO_SCORES
        # Another reply may have come since the drafts were sent off.
        if place is not None and place.base_len == len(sequence.token_ids) and place.drafts[: len(drafts)] == drafts:
            scores = place.confidences[: len(drafts)]
        if len(scores) != len(drafts):
            scores = _NO_SCORE * len(drafts)
        self._report.num_draft_tokens.append(len(drafts))
        self._report.num_accepted_tokens.append(num_accepted)
        self._report.confidences.extend(scores)

    def report(self) -> DraftReport:
        """Everything until now."""
        return self._report
