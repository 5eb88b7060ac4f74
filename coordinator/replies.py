"""What is used of a drafter's reply: rows that are fresh and sane. Nothing that a drafter sends is forwarded unchecked."""

from array import array
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from specwire.errors import InvalidArgumentError
from specwire.messages import DraftRowResult, Proposals, RowStatus
from specwire.proposals import RowProposals, split_proposals, what_is_wrong

from .draft_slot import NO_SCORES, DraftSlot

if TYPE_CHECKING:
    from .link import DraftLink

_MAX_FAILURES = 3
_OK = RowStatus.OK
_NO_SCORE = array("f", [float("nan")])


def take_rows(link: "DraftLink", rows: list[DraftRowResult], *, is_asked: bool, proposals: Proposals | None = None) -> None:
    """Keeps the drafts of rows that are fresh and sane; rows that nobody asked for may have K drafts.

    Args:
        proposals: what the drafts were drawn from; looked at only if the verifier does.
    """
    lane, slots = link.lane, link.slots
    counters, num_asked, vocab_size = lane.counters, lane.num_speculative_tokens, lane.vocab_size
    all_are_sane = _are_sane(rows, vocab_size)
    _note_scores(link, rows)
    drawn, are_garbage = _drawn(link, rows, proposals) if proposals is not None and link.lane.tests_ratio else (None, False)
    for number, row in enumerate(rows):
        status, index, epoch, base_len, drafts, confidences, error = row
        place = slots.get(index)
        if place is None or place.epoch != epoch or base_len != len(place.sequence.token_ids):
            counters.num_stale_drafts += 1
        elif status is not _OK:
            _fail(link, place, status, error)
        elif (
            len(drafts) > (place.num_asked if is_asked else num_asked)
            or len(confidences) not in (0, len(drafts))
            or not (all_are_sane or _are_sane([row], vocab_size))
            or are_garbage
            or (drawn is not None and _is_garbage(drafts, drawn[number], vocab_size))
        ):
            counters.num_garbage_drafts += 1
            counters.fallbacks["garbage"] += 1
            address = link.drafter.address
            lane.log.warning(f"garbage {address}", "drafter %s sent %d drafts that no drafter should send; dropped", address, len(drafts))
            place.base_len, place.drafts, place.confidences = base_len, [], NO_SCORES  # an answer that is worth nothing, which is worth knowing
            place.proposals = None
        else:
            place.base_len = base_len
            place.drafts = drafts
            place.proposals = None if drawn is None else drawn[number]
            place.confidences = confidences or _NO_SCORE * len(drafts)
            place.num_failures = place.num_waits = 0


def _drawn(link: "DraftLink", rows: list[DraftRowResult], proposals: Proposals) -> tuple[list[RowProposals | None] | None, bool]:
    """What each row's drafts were drawn from, and whether that can't be told: then no draft of the answer is of use."""
    try:
        return split_proposals(proposals, [row.draft_tokens for row in rows]), False
    except InvalidArgumentError as error:
        link.lane.log.warning(f"proposals {link.drafter.address}", "drafter %s: %s", link.drafter.address, error)
        return None, True


def _is_garbage(drafts: list[int], proposals: RowProposals | None, vocab_size: int) -> bool:
    """Whether the drafts can't have been drawn from these candidates."""
    return proposals is not None and bool(what_is_wrong(drafts, proposals, vocab_size))


def _are_sane(rows: list[DraftRowResult], vocab_size: int) -> bool:
    """Whether all drafts are in the vocabulary."""
    drafts = list(chain.from_iterable([row.draft_tokens for row in rows]))
    return not drafts or (min(drafts) >= 0 and max(drafts) < vocab_size)


def _note_scores(link: "DraftLink", rows: list[DraftRowResult]) -> None:
    """Counts scores that are no numbers. Their drafts may be as good as any: they count as drafts without a score."""
    is_nan = np.isnan(np.frombuffer(b"".join([row.confidences for row in rows]), dtype=np.float32))
    if is_nan.any():
        address, number = link.drafter.address, int(is_nan.sum())
        link.lane.counters.num_nan_scores += number
        link.lane.log.warning(
            f"scores {address}", "drafter %s sent %d drafts whose score is NaN; they count as drafts without a score", address, number
        )  # fmt: skip


def _fail(link: "DraftLink", place: DraftSlot, status: RowStatus, error: str) -> None:
    """A slot without drafts: it catches up, or the drafter can't go on with it: opened anew, tried elsewhere, or given up."""
    sequence, lane = place.sequence, link.lane
    if status is RowStatus.CATCHING_UP:
        lane.counters.fallbacks["catching_up"] += 1
        place.wait(lane.next_round)
        return
    lane.counters.fallbacks[f"drafter_{status.name.lower()}"] += 1
    lane.log.warning(
        f"draft row {status}", "drafter %s answered %s for a sequence of request %s: %s",
        link.drafter.address, status.name, sequence.request.label, error or "no reason",
    )  # fmt: skip
    link.close_slot(place, makes_room=status is not RowStatus.OUT_OF_BLOCKS)
    if status is RowStatus.STALE and place.num_failures < _MAX_FAILURES:
        link.take(sequence, place.num_failures + 1)
    elif status is RowStatus.OUT_OF_BLOCKS:
        lane.pins.look(sequence, soon=False)
