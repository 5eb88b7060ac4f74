"""The verifier: opens sequences in slots, runs rounds of ragged rows through the target model, samples and accepts.

Nothing that knows of streams, coordinators, clocks or threads may be added here: a round goes in, its answer comes out, in order.

A round may be launched before those ahead of it are read. Lengths are known at its launch, which is all that most rows need; a row that follows
drafts, names its first token, or is sampled where its sequence's tokens must be known, has the rounds ahead of it read first. What a row answers
is settled when its round is read, so answers are as if rounds ran one by one.

A close frees the slot's blocks at once, though launched rounds may still write them: rounds run in the order of their launches, so whoever gets
such a block next writes after them and reads only what it wrote. The prefix cache has only blocks whose tokens were read and found good. Nobody
writes these again, and unread rounds of a closed slot add none.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.runner import RoundCounts
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.messages import RowStatus, SlotRef, VerifyOpen, VerifyResult, VerifyRound, VerifyRowResult
from specwire.proposals import RowProposals, split_proposals

from .executor import Executor
from .features import FeatureBooks
from .launched import LaunchedRound, Unrun
from .plan import Segment, depends_on_unread, plan_common_row, plan_row
from .promises import promised_blocks
from .reader import RoundReader, TokenCounts
from .slots import Slot, VerifierLimits, open_slot

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tally:
    """What the rows of a round ask for so far."""

    slots: set[int] = field(default_factory=set)
    num_tokens: int = 0


class Verifier:
    """All sequences of one session on one model. Not thread-safe: one thread uses it at a time.

    Args:
        executor: runs the target model; it bounds how many rounds may be launched and not read.
        limits: what is accepted.
        enable_prefix_cache: reuse the KV of equal prefixes of equal tenants.
        feature_address: where drafters reach this verifier for features; empty = where the coordinator does.

    Attributes:
        features: of the open sequences; None if the model is run without heads.
    """

    def __init__(self, executor: Executor, limits: VerifierLimits, *, enable_prefix_cache: bool = True, feature_address: str = "") -> None:
        self.limits = limits
        self.counts = TokenCounts()
        self.num_waits = 0
        """Rows that were planned only once the rounds ahead of them were read."""
        self._looks_up_prefixes = enable_prefix_cache
        self._executor = executor
        self._blocks = BlockManager(executor.kv_cache.num_blocks, executor.kv_cache.block_size, enable_prefix_cache=enable_prefix_cache)
        self._slots: dict[int, Slot] = {}
        pages = executor.kv_cache.features
        self.features = None if pages is None else FeatureBooks(pages, limits.max_num_seqs, feature_address)
        self._reader = RoundReader(self._blocks, self.counts)

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

    @property
    def num_unread_rounds(self) -> int:
        """Launched ones whose results nobody has looked at."""
        return len(self._reader.unread)

    @property
    def num_rows(self) -> Counter[RowStatus]:
        """Rows answered so far, by status."""
        return self._reader.num_rows

    @property
    def round_counts(self) -> RoundCounts:
        """Of the executor."""
        return self._executor.counts

    def launch(self, request: VerifyRound) -> LaunchedRound:
        """Starts one round: closes, opens, then all rows in one batch. Every row will be answered, in order.

        Raises:
            InvalidArgumentError: an Open of a live slot, or of more slots than max_num_seqs; proposals of other lengths than the drafts.
            UnsupportedError: conditional drafts, or proposals where drafts are compared. Either way nothing was changed.
        """
        self._check(request)
        proposals = None if request.proposals is None else split_proposals(request.proposals, [row.draft_tokens for row in request.rows])
        for ref in request.closes:
            self._close(ref)
        opened = [self._open(message, request.round) for message in request.opens]
        planned = self._plan_rows(request, proposals)
        segments = [plan for plan in planned if isinstance(plan, Segment)]
        num_padded_tokens = self.round_counts.num_padded_tokens
        pending = self._executor.launch(segments, self._blocks) if segments else None
        num_padded_tokens = self.round_counts.num_padded_tokens - num_padded_tokens
        # Only now: a slot must not be ahead of a round that could not be started.
        number = request.round
        for slot, _, num_known, drafts, samples, *_ in segments:
            slot.launch(number, num_known, len(drafts), samples=samples)
        launched = LaunchedRound(request, planned, segments, pending, num_padded_tokens, opened)
        self._reader.unread.append(launched)
        return launched

    def finish(self, launched: LaunchedRound) -> VerifyResult:
        """Waits for a round and those ahead of it; its answer. Raises what it failed with: its sequences are dead then."""
        while not launched.is_read:
            self._reader.read_oldest()
        if launched.rows is None:
            assert launched.error is not None, f"round {launched.request.round} is read without rows or error"
            raise launched.error
        request = launched.request
        return VerifyResult(
            session=request.session,
            lane=request.lane,
            round=request.round,
            rows=launched.rows,
            free_blocks=self.num_free_blocks,
            num_padded_tokens=launched.num_padded_tokens,
            opened_num_cached_tokens=launched.opened,
            features=[] if self.features is None else self.features.handles(request.session, launched.segments, self._blocks),
        )

    def reset(self) -> None:
        """Waits for all rounds, then closes all slots; the prefix cache stays."""
        self._reader.read_all()
        for slot in list(self._slots.values()):
            self._close(SlotRef(slot.slot, slot.epoch))

    def num_promised_blocks(self, queued: Sequence[VerifyRound]) -> int:
        """Most blocks that these rounds, received but not launched, can still take from the free ones."""
        return promised_blocks(queued, self._slots.values(), self._blocks) if queued else 0

    def check_integrity(self) -> None:
        """Asserts that blocks and slots agree. For tests."""
        self._blocks.check_integrity()
        assert self._blocks.num_sequences == len(self._slots), f"{self._blocks.num_sequences} block owners, {len(self._slots)} slots"
        for slot in self._slots.values():
            num_final = self._blocks.num_final_tokens(slot.slot)
            assert slot.num_computed_tokens == num_final, f"slot {slot.slot}: {slot.num_computed_tokens} computed, {num_final} final"
            unread = [segment for launched in self._reader.unread for segment in launched.segments if segment.slot is slot]
            counts = len(unread), sum(segment.samples for segment in unread), num_final + sum(segment.num_known for segment in unread)
            kept = slot.num_unread_rows, slot.num_unread_tokens, slot.num_launched_tokens
            assert slot.error or counts == kept, f"slot {slot.slot}: unread rows, unread tokens, launched tokens are {counts}, kept {kept}"

    def _check(self, request: VerifyRound) -> None:
        if request.conditional is not None:
            raise UnsupportedError(f"round {request.round} carries conditional drafts, which this verifier does not take; send plain draft tokens")
        if request.proposals is not None and not self.limits.tests_ratio:
            raise UnsupportedError(
                f"round {request.round} carries proposals (the ratio test), but this verifier compares drafts; send plain draft tokens, or start it "
                "with rejection_sample_method probabilistic"
            )
        if not request.opens:
            return
        live = {slot.slot for slot in self._slots.values() if SlotRef(slot.slot, slot.epoch) not in request.closes}
        for message in request.opens:
            if message.slot in live:
                raise InvalidArgumentError(f"slot {message.slot} is open; close it before epoch {message.epoch} opens it")
            live.add(message.slot)
        if len(live) > self.limits.max_num_seqs:
            raise InvalidArgumentError(f"{len(live)} slots would be open, but max_num_seqs is {self.limits.max_num_seqs}; close some or raise it")

    def _open(self, message: VerifyOpen, round_number: int) -> int:
        """Tokens that are in the prefix cache."""
        latest = next(reversed(self._slots.values()), None)
        slot = open_slot(message, self.limits, self._executor.sampling_device, None if latest is None else latest.sampling)
        self._slots[slot.slot] = slot
        self._take_cached(slot, self._blocks.open(slot.slot, slot.token_ids, message.tenant_cache_key), round_number)
        if self._looks_up_prefixes:
            self.counts.num_looked_up_tokens += len(slot.token_ids)
        if slot.sampling is not None:
            slot.keeps_history = self._executor.samples_on_host(slot.sampling)
            self._executor.open(slot)
            if self.features is not None:
                self.features.open(slot)
        else:
            logger.warning("request %r cannot be served: %s", message.request_id, slot.error)
        return slot.num_cached_tokens

    def _take_cached(self, slot: Slot, num_cached_tokens: int, round_number: int) -> None:
        """The prefix cache has so many tokens of a slot of which nothing was launched."""
        self.counts.num_cached_tokens += num_cached_tokens - slot.num_cached_tokens
        slot.num_cached_tokens = slot.num_computed_tokens = slot.num_launched_tokens = num_cached_tokens
        slot.looked_up_round = round_number

    def _close(self, ref: SlotRef) -> None:
        slot = self._slots.get(ref.slot)
        if slot is None or slot.epoch != ref.epoch:
            return
        del self._slots[ref.slot]
        slot.is_closed = True
        if self.features is not None and slot.sampling is not None:
            self.features.close(slot)
        if slot.num_unread_rows:
            slot.cached_blocks = self._blocks.cached_blocks(ref.slot)
        self._blocks.close(ref.slot, forget=bool(slot.error))
        if slot.sampling is not None:
            self._executor.close(slot)

    def _plan_rows(self, request: VerifyRound, proposals: Sequence[RowProposals | None] | None) -> list[Segment | Unrun | VerifyRowResult]:
        """What becomes of each row. They are gone through in order: one may have unread rounds read, which the next ones depend on."""
        rows, limits, find, tally = request.rows, self.limits, self._slots.get, _Tally()
        is_special = bool(request.overlays) or proposals is not None or len({row.slot for row in rows}) < len(rows)
        planned: list[Segment | Unrun | VerifyRowResult] = []
        for index, row in enumerate(rows):
            slot, num_tokens = find(row.slot), 1 + len(row.draft_tokens)
            segment = None if is_special or slot is None else plan_common_row(slot, row, limits)
            if slot is None or segment is None or tally.num_tokens + num_tokens > limits.max_num_batched_tokens:
                planned.append(self._plan(request, index, tally, None if proposals is None else proposals[index]))
                continue
            tally.num_tokens += num_tokens
            has_blocks = segment.start_position + num_tokens <= slot.num_reserved_tokens or self._reserve(segment)
            planned.append(segment if has_blocks else Unrun(slot, RowStatus.OUT_OF_BLOCKS))
        return planned

    def _reserve(self, segment: Segment) -> bool:
        """Whether there are blocks for all tokens up to a segment's last one."""
        slot, end, size = segment.slot, segment.end_position, self._blocks.block_size
        if not self._blocks.reserve(slot.slot, end):
            return False
        slot.num_reserved_tokens = max(slot.num_reserved_tokens, -(-end // size) * size)
        return True

    def _plan(self, request: VerifyRound, index: int, tally: _Tally, proposals: RowProposals | None) -> Segment | Unrun | VerifyRowResult:
        """A row's segment, its blocks reserved, or what becomes of a row that the model need not see.

        Args:
            index: of the row.
            tally: of the rows before it; the row is added.
            proposals: what the row's drafts were drawn from.
        """
        row = request.rows[index]
        slot = self._slots.get(row.slot)
        if slot is None or slot.epoch != row.epoch:
            return VerifyRowResult(RowStatus.STALE)
        if not slot.error and row.slot not in tally.slots and row.parent_round != slot.last_round:
            return Unrun(slot, RowStatus.STALE)
        if depends_on_unread(slot, row):
            self.num_waits += 1
            self._reader.read_all()
        if not slot.last_round and slot.looked_up_round != request.round and not slot.error:
            # It was opened ahead of its first row: the rounds between may have computed what it shares with others.
            self._take_cached(slot, self._blocks.look_up(slot.slot, slot.token_ids), request.round)
        try:
            self._check_row(request, index, slot, tally)
            segment = plan_row(slot, row, self.limits, proposals)
        except InvalidArgumentError as error:
            slot.kill(str(error), request.round)
            return Unrun(slot, RowStatus.BAD)
        if segment is None:
            slot.last_round, slot.last_num_drafts = request.round, 0
            return Unrun(slot, RowStatus.OK)
        return segment if self._reserve(segment) else Unrun(slot, RowStatus.OUT_OF_BLOCKS)

    def _check_row(self, request: VerifyRound, index: int, slot: Slot, tally: _Tally) -> None:
        """What depends on the rest of the round; raises InvalidArgumentError."""
        row = request.rows[index]
        if slot.error:
            raise InvalidArgumentError(slot.error)
        if row.slot in tally.slots:
            raise InvalidArgumentError(f"slot {row.slot} has two rows in round {request.round}; send one row a slot and round")
        if request.overlays and any(overlay.row == index for overlay in request.overlays):
            raise InvalidArgumentError(f"row {index} has a logit overlay (grammar), which this verifier does not apply; remove it")
        tally.slots.add(row.slot)
        tally.num_tokens += row.token_budget or 1 + len(row.draft_tokens)
        if tally.num_tokens > self.limits.max_num_batched_tokens:
            raise InvalidArgumentError(
                f"with row {index} round {request.round} has {tally.num_tokens} tokens, but max_num_batched_tokens is "
                f"{self.limits.max_num_batched_tokens}; send fewer, or raise it at the verifier"
            )
