"""A sequence's place at a drafter."""

import heapq
import sys
from array import array
from collections.abc import Collection, Iterable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from specwire.messages import DraftCommit, DraftOpen
from specwire.policy.grades import UNKNOWN
from specwire.proposals import RowProposals

from .features import list_features

if TYPE_CHECKING:
    from .link import DraftLink
    from .sequence import Sequence

_NAN = float("nan")
_IN_STEP = 32
"""Tokens that a drafter computes with a sequence's drafts; behind by more it has to catch up first."""
_MAX_WAITS = 8
"""Rounds between two asks while a drafter catches up: what is committed meanwhile can be computed with the first drafts."""
_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""
NO_SCORES = array("f")
"""Shared by slots without drafts; never written."""


class DraftSlot:
    """One life of a drafter slot. Drafts in it are fresh iff base_len is the sequence's length now.

    Attributes:
        drafts, confidences: of the last answer, equally many; a score that is NaN is none.
        proposals: what those drafts were drawn from; None = nothing else could have been drafted, or nobody asked.
        group: what kind of drafts they are, once adaptive verification has asked for it.
        num_waits: rounds that it was given for its last catching up; 0 = it has caught up. ask_round: it is not asked in rounds before this one.
        quality, grade: how good they were lately, and graded_step, the last one that said so (specwire.policy.grades).
    """

    __slots__ = (
        "ask_round",
        "base_len",
        "confidences",
        "drafts",
        "epoch",
        "grade",
        "graded_step",
        "group",
        "index",
        "is_open",
        "link",
        "num_asked",
        "num_failures",
        "num_sent_tokens",
        "num_told_blocks",
        "num_waits",
        "parent_round",
        "proposals",
        "quality",
        "sequence",
    )

    def __init__(self, link: "DraftLink", index: int, epoch: int, sequence: "Sequence") -> None:
        self.link = link
        self.index = index
        self.epoch = epoch
        self.sequence = sequence
        self.is_open = False
        self.num_sent_tokens = 0
        self.num_told_blocks = 0
        self.num_asked = 0
        self.num_failures = 0
        self.num_waits = 0
        self.ask_round = 0
        self.parent_round = 0
        self.group = -1
        self.quality = _NAN
        self.grade = UNKNOWN
        self.graded_step = 0
        self.base_len = 0
        self.drafts: list[int] = []
        self.confidences = NO_SCORES
        self.proposals: RowProposals | None = None

    @property
    def is_in_step(self) -> bool:
        """Its drafter can be asked, and knows nearly all of the sequence."""
        return self.is_open and self.link.is_usable and len(self.sequence.token_ids) - self.num_sent_tokens <= _IN_STEP

    def take_commit(self) -> DraftCommit:
        """What the sequence has got since its drafter was told of it: one token at least."""
        known, num_sent = self.sequence.token_ids, self.num_sent_tokens
        self.num_sent_tokens = len(known)
        return _new(DraftCommit, (self.index, self.epoch, num_sent, known[num_sent:]))

    def wait(self, round_: int) -> None:
        """It was catching up when it was asked for drafts of this round: it is asked again in the next one, then with ever longer breaks, since an
        answer without drafts costs a step as much as one with them."""
        self.num_waits = min(2 * self.num_waits or 1, _MAX_WAITS)
        self.ask_round = round_ + self.num_waits

    def open(self) -> DraftOpen:
        sequence = self.sequence
        message = sequence.request.message
        self.is_open = True
        list_features(self)
        self.num_sent_tokens = len(sequence.token_ids)
        return DraftOpen(
            slot=self.index,
            epoch=self.epoch,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=message.sampling,
            noise_key=sequence.request.noise_key,
            choice=sequence.choice,
            tenant_cache_key=message.tenant_cache_key,
            variant=message.variant,
            request_id=message.request_id,
        )


class Opening(NamedTuple):
    """Which sequences a drafter is told of though nobody asks for their drafts.

    Args:
        most_open: that it may know of, all in all.
        in_step: of those that it knows, which it is told all of.
    """

    most_open: int
    in_step: Collection[DraftSlot] = ()


OPEN_ALL, OPEN_NONE = Opening(sys.maxsize), Opening(0)


def least_judged(places: Iterable[DraftSlot], number: int) -> list[DraftSlot]:
    """So many of them whose grades are oldest; those last that were catching up when they were asked: they may be for long."""
    return heapq.nsmallest(number, places, key=_last_judged)


def _last_judged(place: DraftSlot) -> tuple[int, int]:
    return place.num_waits, place.graded_step


def take_opens(waiting: dict[DraftSlot, None], most: int, max_tokens: int) -> list[DraftOpen]:
    """Opens of slots that wait for one, as many as fit into a message with certainty; the others go on waiting. Where there are more than `most`,
    of the latest: their sequences go on longest."""
    opens: list[DraftOpen] = []
    num_tokens = 0
    for place in list(waiting) if most >= len(waiting) else list(islice(reversed(waiting), most)):
        if opens and num_tokens + len(place.sequence.token_ids) > max_tokens:
            continue
        num_tokens += len(place.sequence.token_ids)
        opens.append(place.open())
        del waiting[place]
    return opens
