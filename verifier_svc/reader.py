"""What becomes of launched rounds: read in order, taken into their slots, answered."""

import logging
from collections import Counter, deque
from dataclasses import dataclass
from operator import itemgetter

from specwire.engine.block_manager import BlockManager
from specwire.engine.sampling.segments import SegmentTokens
from specwire.messages import RowStatus, VerifyRowResult

from .launched import LaunchedRound, Unrun
from .plan import Segment
from .slots import Slot

logger = logging.getLogger(__name__)

_OK = RowStatus.OK
_status = itemgetter(VerifyRowResult._fields.index("status"))
_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""
_BAD_NUMBERS = "the model's logits are NaN or infinite, or no token was left to sample; the request cannot go on"


@dataclass(slots=True)
class TokenCounts:
    """Tokens since the start, of all sessions. Those that went through the model the executor counts."""

    num_draft_tokens: int = 0  # verified ones
    num_accepted_tokens: int = 0
    num_looked_up_tokens: int = 0  # of opened sequences, in the prefix cache
    num_cached_tokens: int = 0  # those that it had


class RoundReader:
    """The rounds that are launched and not read.

    Args:
        blocks: of all slots; final tokens are told to it.
        counts: takes drafts and accepted ones.
    """

    def __init__(self, blocks: BlockManager, counts: TokenCounts) -> None:
        self.num_rows: Counter[RowStatus] = Counter()
        self.unread: deque[LaunchedRound] = deque()
        self._blocks = blocks
        self._counts = counts

    def read_all(self) -> None:
        """Waits for all of them."""
        while self.unread:
            self.read_oldest()

    def read_oldest(self) -> None:
        """Waits for a round, then takes what the model said into its slots, in the order of rows. If it failed, its slots die."""
        launched = self.unread.popleft()
        number = launched.request.round
        try:
            outputs = launched.pending.results() if launched.pending is not None else []
            num_segments = len(launched.segments)
            assert len(outputs) == num_segments, f"round {number} has {num_segments} segments, {len(outputs)} came out"
            if num_segments == len(launched.planned):
                rows = [self._settle(number, segment, output) for segment, output in zip(launched.segments, outputs, strict=True)]
            else:
                rest = iter(outputs)
                rows = [self._settle(number, plan, next(rest)) if isinstance(plan, Segment) else _unrun(number, plan) for plan in launched.planned]
        except Exception as error:
            # Later rounds may be launched on top of this one: nothing of them may count.
            launched.error = error
            for segment in launched.segments:
                self._kill(segment.slot, f"round {number} failed with {type(error).__name__}; reopen the sequence", number)
            return
        launched.rows = rows
        self.num_rows.update(map(_status, rows))

    def _settle(self, number: int, segment: Segment, output: SegmentTokens) -> VerifyRowResult:
        """Takes good numbers into the slot; the row's answer."""
        slot, start, num_known, drafts, samples, *_ = segment
        num_accepted, emitted, is_bad, logprobs, _ = output
        slot.num_unread_rows -= 1
        slot.num_unread_tokens -= samples
        if is_bad or slot.error:
            if slot.is_dead_in(number):
                return _answer(slot, RowStatus.BAD)
            if is_bad:
                logger.error("slot %d at token %d: %s", slot.slot, start, _BAD_NUMBERS)
                self._kill(slot, _BAD_NUMBERS, number)
                return _answer(slot, RowStatus.BAD)
        token_ids, num_final = slot.token_ids, num_known + num_accepted
        token_ids += emitted
        if not slot.is_closed:
            self._blocks.finalize(slot.slot, token_ids[start : start + num_final])
        slot.num_computed_tokens = num_computed_tokens = slot.num_computed_tokens + num_final
        if drafts:
            slot.num_launched_tokens += num_accepted
            self._counts.num_draft_tokens += len(drafts)
            self._counts.num_accepted_tokens += num_accepted
        if slot.keeps_history and slot.sampling is not None:
            slot.sampling.append(emitted)
        return _new(VerifyRowResult, (_OK, num_computed_tokens, slot.num_cached_tokens, num_accepted, list(emitted), logprobs, ""))

    def _kill(self, slot: Slot, error: str, number: int) -> None:
        slot.kill(error, number)
        self._blocks.forget(slot.cached_blocks)


def _unrun(number: int, plan: Unrun | VerifyRowResult) -> VerifyRowResult:
    """The answer to a row that the model did not see."""
    if isinstance(plan, VerifyRowResult):
        return plan
    return _answer(plan.slot, RowStatus.BAD if plan.slot.is_dead_in(number) else plan.status)


def _answer(slot: Slot, status: RowStatus) -> VerifyRowResult:
    return VerifyRowResult(status, slot.num_computed_tokens, slot.num_cached_tokens, error=slot.error if status is RowStatus.BAD else "")
