"""A sequence's place at a verifier, and the rounds that are under way there."""

from typing import TYPE_CHECKING

from specwire.errors import InternalError
from specwire.messages import VerifyOpen, VerifyResult, VerifyRow

if TYPE_CHECKING:
    from .features import SlotFeatures
    from .lane import Lane
    from .plan import Plan
    from .sequence import Sequence

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""


class Slot:
    """One life of a verifier slot: from the plan to open it until it is closed.

    Attributes:
        is_open: its Open was sent.
        is_closed: it takes no more rows; answers still count until the sequence has its next slot.
        is_prefilling: no row of it has sampled yet.
        num_known_tokens: tokens that its Open brings.
        num_computed_tokens: as of the last answer.
        parent_round: the last round that holds a row of it; last_ran_round: the last one whose row ran.
        num_in_flight: rows that are not answered yet.
        num_ahead: tokens that rows in flight are certain to add.
        num_chunks, num_chunk_tokens: prefill rows in flight, and their budgets.
        has_failed: a row did not run, so later rows in flight won't either.
        features: where its features are; None as long as its verifier has not said it.
    """

    __slots__ = (
        "epoch", "features", "has_failed", "index", "is_closed", "is_last_chunk", "is_open", "is_prefilling", "lane", "last_ran_round", "num_ahead",
        "num_chunk_tokens", "num_chunks", "num_computed_tokens", "num_in_flight", "num_known_tokens", "parent_round", "sequence",
    )  # fmt: skip

    def __init__(self, lane: "Lane", index: int, epoch: int, sequence: "Sequence") -> None:
        self.lane = lane
        self.index = index
        self.epoch = epoch
        self.sequence = sequence
        self.is_open = False
        self.is_closed = False
        self.is_prefilling = True
        self.num_known_tokens = len(sequence.token_ids)
        self.num_computed_tokens = 0
        self.parent_round = 0
        self.last_ran_round = 0
        self.num_in_flight = 0
        self.num_ahead = 0
        self.num_chunks = 0
        self.num_chunk_tokens = 0
        self.is_last_chunk = False
        self.has_failed = False
        self.features: SlotFeatures | None = None

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that neither are computed nor have a chunk in flight, if nothing is cached."""
        return self.num_known_tokens - self.num_computed_tokens - self.num_chunk_tokens

    def open(self, eos_token_ids: tuple[int, ...]) -> VerifyOpen:
        sequence = self.sequence
        message = sequence.request.message
        self.is_open = True
        self.num_known_tokens = len(sequence.token_ids)
        return VerifyOpen(
            slot=self.index,
            epoch=self.epoch,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=message.sampling,
            noise_key=sequence.request.noise_key,
            choice=sequence.choice,
            eos_token_ids=eos_token_ids,
            tenant_cache_key=message.tenant_cache_key,
            synthetic_acceptance_rates=message.synthetic_acceptance_rates,
            variant=message.variant,
            request_id=message.request_id,
        )

    def chunk_row(self, round_: int, budget: int) -> VerifyRow:
        """A prefill row of at most `budget` tokens."""
        row = VerifyRow(self.index, self.epoch, self.parent_round, budget)
        self.parent_round = round_
        self.num_in_flight += 1
        self.num_chunks += 1
        self.num_chunk_tokens += budget
        self._mark_last_chunk()
        return row

    def open_answered(self, num_cached_tokens: int) -> None:
        """So many of its tokens need not be computed."""
        self.num_computed_tokens = max(self.num_computed_tokens, num_cached_tokens)

    def chunk_answered(self, budget: int, num_computed_tokens: int) -> None:
        """Takes a chunk out of the books; before its tokens are committed."""
        self.num_chunks -= 1
        self.num_chunk_tokens -= budget
        self.num_computed_tokens = max(self.num_computed_tokens, num_computed_tokens)
        if self.is_last_chunk:
            self.is_last_chunk = False
            self.num_ahead -= 1
        else:
            self._mark_last_chunk()

    def resume(self) -> None:
        """Goes on after the last row that ran: what was in flight is answered."""
        assert not self.num_in_flight, f"slot {self.index} resumes with {self.num_in_flight} rows in flight"
        assert not self.num_ahead, f"slot {self.index} resumes {self.num_ahead} tokens ahead"
        self.parent_round = self.last_ran_round
        self.has_failed = False

    def _mark_last_chunk(self) -> None:
        """A chunk samples for certain iff it is the only one in flight (an earlier one may find cached tokens and sample instead) and its
        budget covers whatever may remain."""
        num_remaining = self.num_known_tokens - self.num_computed_tokens
        if self.num_chunks == 1 and not self.is_last_chunk and 0 < num_remaining <= self.num_chunk_tokens:
            self.is_last_chunk = True
            self.num_ahead += 1


def decode_rows(slots: list[Slot], drafts: list[list[int]], round_: int) -> list[VerifyRow]:
    """For each slot the row that follows all known tokens and those that are certain to come."""
    rows: list[VerifyRow] = []
    for slot, draft in zip(slots, drafts, strict=True):
        token_ids, num_ahead, parent_round = slot.sequence.token_ids, slot.num_ahead, slot.parent_round
        slot.parent_round = round_
        slot.num_in_flight += 1
        if num_ahead:
            assert not draft, f"{len(draft)} drafts after {num_ahead} tokens that are still in flight"
            slot.num_ahead = num_ahead + 1
            rows.append(_new(VerifyRow, (slot.index, slot.epoch, parent_round, 0, len(token_ids) + num_ahead, -1, parent_round, draft)))
        else:
            if not draft:
                slot.num_ahead = 1
            rows.append(_new(VerifyRow, (slot.index, slot.epoch, parent_round, 0, len(token_ids), token_ids[-1], 0, draft)))
    return rows


class Round:
    """A round that was sent: the slots that it opens, its rows, the slots that they belong to, and the plan that it carries out."""

    __slots__ = ("number", "opened", "plan", "rows", "slots")

    def __init__(self, number: int, opened: list[Slot], rows: list[VerifyRow], slots: list[Slot], plan: "Plan") -> None:
        self.number = number
        self.opened = opened
        self.rows = rows
        self.slots = slots
        self.plan = plan

    def check(self, result: VerifyResult, vocab_size: int) -> None:
        """Raise InternalError unless this can be the round's answer."""
        if result.round != self.number or len(result.rows) != len(self.rows):
            text = f"the verifier answered round {result.round} with {len(result.rows)} rows"
            raise InternalError(f"{text}, but round {self.number} with {len(self.rows)} rows was next")
        least, largest = result.token_id_range
        if least < 0 or largest >= vocab_size:
            raise InternalError(f"the verifier emitted token ids from {least} to {largest}, but they are from 0 to {vocab_size - 1}")
