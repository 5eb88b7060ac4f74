"""The verifier: opens sequences in slots, runs rounds of ragged rows through the target model, samples and accepts.

Nothing that knows of streams, coordinators, clocks or threads may be added here: a round goes in, its answer comes out, in order.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.engine.block_manager import BlockManager
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.segments import SegmentTokens
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.messages import RowStatus, SlotRef, VerifyOpen, VerifyResult, VerifyRound, VerifyRowResult

from .forward import run_segments
from .plan import Segment, plan_row
from .slots import Slot, VerifierLimits, open_slot

logger = logging.getLogger(__name__)

_BAD_NUMBERS = "the model's logits are NaN or infinite, or no token was left to sample; the request cannot go on"


@dataclass(slots=True)
class _Tally:
    """What the rows of a round ask for so far."""

    slots: set[int] = field(default_factory=set)
    num_tokens: int = 0


@dataclass(slots=True)
class TokenCounts:
    """Tokens since the start, of all sessions."""

    num_tokens: int = 0  # through the model
    num_padded_tokens: int = 0  # the same, with padding
    num_draft_tokens: int = 0  # verified ones
    num_accepted_tokens: int = 0
    num_looked_up_tokens: int = 0  # of opened sequences, in the prefix cache
    num_cached_tokens: int = 0  # those that it had


class Verifier:
    """All sequences of one session on one model. Not thread-safe: one thread owns it.

    Args:
        runner: the target model and its KV cache.
        limits: what is accepted.
        enable_prefix_cache: reuse the KV of equal prefixes of equal tenants.
    """

    def __init__(self, runner: ModelRunner, limits: VerifierLimits, *, enable_prefix_cache: bool = True) -> None:
        self.limits = limits
        self.num_rows: Counter[RowStatus] = Counter()
        """Rows answered so far, by status."""
        self.counts = TokenCounts()
        self._looks_up_prefixes = enable_prefix_cache
        self._runner = runner
        self._blocks = BlockManager(runner.kv_cache.num_blocks, runner.kv_cache.block_size, enable_prefix_cache=enable_prefix_cache)
        self._slots: dict[int, Slot] = {}

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that rows can take now."""
        return self._blocks.num_free_blocks

    @property
    def num_open_slots(self) -> int:
        return len(self._slots)

    def launch(self, request: VerifyRound) -> VerifyResult:
        """Runs one round: closes, opens, then all rows in one batch. Every row is answered, in order.

        Raises:
            InvalidArgumentError: an Open of a live slot, or of more slots than max_num_seqs.
            UnsupportedError: proposals or conditional drafts. Either way nothing was changed.
        """
        self._check(request)
        for ref in request.closes:
            self._close(ref)
        for message in request.opens:
            self._open(message)
        tally = _Tally()
        planned = [self._plan(request, index, tally) for index in range(len(request.rows))]
        outputs = iter(run_segments(self._runner, self._blocks, [plan for plan in planned if isinstance(plan, Segment)]))
        rows = [self._commit(request.round, plan, next(outputs)) if isinstance(plan, Segment) else plan for plan in planned]
        self.num_rows.update(row.status for row in rows)
        num_tokens = sum(plan.num_tokens for plan in planned if isinstance(plan, Segment))
        self.counts.num_tokens += num_tokens
        self.counts.num_padded_tokens += num_tokens
        return VerifyResult(
            session=request.session,
            lane=request.lane,
            round=request.round,
            rows=rows,
            free_blocks=self.num_free_blocks,
            num_padded_tokens=num_tokens,
        )

    def reset(self) -> None:
        """Closes all slots; the prefix cache stays."""
        for slot in list(self._slots.values()):
            self._close(SlotRef(slot.slot, slot.epoch))

    def num_promised_blocks(self, queued: Sequence[VerifyRound]) -> int:
        """Most blocks that these rounds, received but not launched, can still take from the free ones."""
        known = {SlotRef(s.slot, s.epoch): (s.num_computed_tokens, s.num_opened_tokens) for s in self._slots.values() if not s.error}
        num_held = {ref: len(self._blocks.block_table(ref.slot)) for ref in known}
        num_needed: dict[SlotRef, int] = {}
        for request in queued:
            for message in request.opens:
                ref = SlotRef(message.slot, message.epoch)
                known[ref], num_held[ref] = (0, len(message.token_ids)), 0
            for row in request.rows:
                ref = SlotRef(row.slot, row.epoch)
                if ref in known:
                    num_computed, num_opened = known[ref]
                    num_prefilled = min(num_needed.get(ref, num_computed) + row.token_budget, num_opened)
                    num_needed[ref] = num_prefilled if row.token_budget else row.base_len + len(row.draft_tokens)
        block_size = self._blocks.block_size
        return sum(max(0, -(-num_tokens // block_size) - num_held[ref]) for ref, num_tokens in num_needed.items())

    def check_integrity(self) -> None:
        """Asserts that blocks and slots agree. For tests."""
        self._blocks.check_integrity()
        assert self._blocks.num_sequences == len(self._slots), f"{self._blocks.num_sequences} block owners, {len(self._slots)} slots"
        for slot in self._slots.values():
            num_final = self._blocks.num_final_tokens(slot.slot)
            assert slot.num_computed_tokens == num_final, f"slot {slot.slot}: {slot.num_computed_tokens} computed, {num_final} final"

    def _check(self, request: VerifyRound) -> None:
        if request.proposals is not None or request.conditional is not None:
            name = "proposals (the ratio test)" if request.proposals is not None else "conditional drafts"
            raise UnsupportedError(f"round {request.round} carries {name}, which this verifier does not take; send plain draft tokens")
        live = {slot.slot for slot in self._slots.values() if SlotRef(slot.slot, slot.epoch) not in request.closes}
        for message in request.opens:
            if message.slot in live:
                raise InvalidArgumentError(f"slot {message.slot} is open; close it before epoch {message.epoch} opens it")
            live.add(message.slot)
        if request.opens and len(live) > self.limits.max_num_seqs:
            raise InvalidArgumentError(f"{len(live)} slots would be open, but max_num_seqs is {self.limits.max_num_seqs}; close some or raise it")

    def _open(self, message: VerifyOpen) -> None:
        slot = open_slot(message, self.limits, self._runner.model.device)
        slot.num_cached_tokens = slot.num_computed_tokens = self._blocks.open(slot.slot, slot.token_ids, message.tenant_cache_key)
        self._slots[slot.slot] = slot
        if self._looks_up_prefixes:
            self.counts.num_looked_up_tokens += len(slot.token_ids)
            self.counts.num_cached_tokens += slot.num_cached_tokens
        if slot.error:
            logger.warning("request %r cannot be served: %s", message.request_id, slot.error)

    def _close(self, ref: SlotRef) -> None:
        slot = self._slots.get(ref.slot)
        if slot is not None and slot.epoch == ref.epoch:
            del self._slots[ref.slot]
            self._blocks.close(ref.slot, forget=bool(slot.error))

    def _plan(self, request: VerifyRound, index: int, tally: _Tally) -> Segment | VerifyRowResult:
        """A row's segment, its blocks reserved, or the answer of a row that the model need not see.

        Args:
            index: of the row.
            tally: of the rows before it; the row is added.
        """
        row = request.rows[index]
        slot = self._slots.get(row.slot)
        if slot is None or slot.epoch != row.epoch:
            return VerifyRowResult(RowStatus.STALE)
        if not slot.error and row.slot not in tally.slots and row.parent_round != slot.last_round:
            return _answer(slot, RowStatus.STALE)
        try:
            self._check_row(request, index, slot, tally)
            segment = plan_row(slot, row, self.limits)
        except InvalidArgumentError as error:
            return _kill(slot, str(error))
        if segment is None:
            slot.last_round, slot.last_num_drafts = request.round, 0
            return _answer(slot, RowStatus.OK)
        return segment if self._blocks.reserve(slot.slot, segment.end_position) else _answer(slot, RowStatus.OUT_OF_BLOCKS)

    def _check_row(self, request: VerifyRound, index: int, slot: Slot, tally: _Tally) -> None:
        """What depends on the rest of the round; raises InvalidArgumentError."""
        row = request.rows[index]
        if slot.error:
            raise InvalidArgumentError(slot.error)
        if row.slot in tally.slots:
            raise InvalidArgumentError(f"slot {row.slot} has two rows in round {request.round}; send one row a slot and round")
        if any(overlay.row == index for overlay in request.overlays):
            raise InvalidArgumentError(f"row {index} has a logit overlay (grammar), which this verifier does not apply; remove it")
        tally.slots.add(row.slot)
        tally.num_tokens += row.token_budget or 1 + len(row.draft_tokens)
        if tally.num_tokens > self.limits.max_num_batched_tokens:
            raise InvalidArgumentError(
                f"with row {index} round {request.round} has {tally.num_tokens} tokens, but max_num_batched_tokens is "
                f"{self.limits.max_num_batched_tokens}; send fewer, or raise it at the verifier"
            )

    def _commit(self, round_number: int, segment: Segment, output: SegmentTokens) -> VerifyRowResult:
        """Takes what the model said into the slot."""
        slot = segment.slot
        if output.is_bad:
            logger.error("slot %d at token %d: %s", slot.slot, segment.start_position, _BAD_NUMBERS)
            return _kill(slot, _BAD_NUMBERS)
        num_final = segment.num_known + output.num_accepted
        slot.token_ids += output.token_ids
        self._blocks.finalize(slot.slot, slot.token_ids[segment.start_position : segment.start_position + num_final])
        slot.num_computed_tokens += num_final
        self.counts.num_draft_tokens += len(segment.draft_tokens)
        self.counts.num_accepted_tokens += output.num_accepted
        slot.last_round, slot.last_num_drafts = round_number, len(segment.draft_tokens)
        if slot.sampling is not None:
            slot.sampling.append(output.token_ids)
        return _answer(slot, RowStatus.OK)._replace(num_accepted=output.num_accepted, token_ids=list(output.token_ids), logprobs=output.logprobs)


def _answer(slot: Slot, status: RowStatus) -> VerifyRowResult:
    return VerifyRowResult(status, slot.num_computed_tokens, slot.num_cached_tokens)


def _kill(slot: Slot, error: str) -> VerifyRowResult:
    """The slot is dead from here on: its later rows are answered with the same error."""
    slot.error = error
    return _answer(slot, RowStatus.BAD)._replace(error=error)
