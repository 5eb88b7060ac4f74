"""What a step should take, by the services' own measurements and what steps took lately (design section 4). numpy only."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specwire.messages import DraftCost, VerifyCost
from specwire.policy.clock import StepClock
from specwire.policy.curves import DraftCurve, FloatArray, HopCurve, IntArray, VerifyCurve


class StepShape(NamedTuple):
    """A step but for how many drafts are verified.

    Args:
        num_tokens: tokens of all rows without drafts (T).
        num_rows: rows of the round.
        num_kv_tokens: tokens before the rows' own ones, which attention reads.
        longest_row: tokens of its longest prefill chunk; 1 without any.
        num_requested: drafts that each sequence is asked for (K_request); 0 = the lane runs ahead.
        num_drafting: sequences that each of `StepCost.drafts` drafts for.
        leaves_run_ahead: the step before ran ahead, or could have.
        num_asked: sequences that are asked for more than 0, 1, ... drafts; empty: all for num_requested.
    """

    num_tokens: int
    num_rows: int
    num_kv_tokens: int = 0
    longest_row: int = 1
    num_requested: int = 0
    num_drafting: Sequence[int] = ()
    leaves_run_ahead: bool = False
    num_asked: Sequence[int] = ()


class StepMs(NamedTuple):
    """Milliseconds of a step's parts. Measured ones may be 0: not known.

    Args:
        verify_ms: the verifier's work on this round alone: from its start, or the end of the round before it if that is later, to its end.
        draft_ms: the work of the drafter that took longest.
        hop_ms: all the rest: ways to the peers and back, and the coordinator's own work.
    """

    verify_ms: float
    draft_ms: float
    hop_ms: float


class StepCost:
    """The critical path of a step, for T tokens without drafts and B drafts that are verified. With V = verify(T + B), D = draft(K_request,
    sequences), and H(n) = the coordinator's work and n hops:

        K_request = 0:  max(V, H(1))                     run-ahead: the next round is at the verifier before this one has ended
        K_request > 0:  H(2) + D + V                     lockstep: one after the other
                        + min(V, H(1)) if it leaves run-ahead: the bubble. The round that runs ahead next finds the verifier idle, and
                          takes H(1) + V instead of max(V, H(1)).

    Each curve has a slow factor of its own, the verifier's one for each size, which follow what `observe` is told, and the whole has another one, by
    the clock. Curves may be shared: a drafter's by all lanes.

    Args:
        verify: the lane's verifier.
        drafts: the lane's drafters, asked all at once: the slowest one counts.
        hops: between the peers.
        num_in_flight: rounds in flight (W); with 1 nothing runs ahead: K_request = 0 costs H(1) + V, and there is no bubble.
    """

    def __init__(self, verify: VerifyCurve, drafts: Sequence[DraftCurve] = (), hops: HopCurve | None = None, num_in_flight: int = 2) -> None:
        self.verify = verify
        self.drafts = tuple(drafts)
        self.hops = hops or HopCurve()
        self.clock = StepClock()
        self._runs_ahead = num_in_flight > 1

    @classmethod
    def from_tables(cls, verify: VerifyCost, draft: Sequence[DraftCost] = (), draft_ms_per_kv_token: float = 0.0) -> "StepCost":
        """Of one verifier and one drafter, as they describe themselves."""
        return cls(VerifyCurve(verify), [DraftCurve(draft, draft_ms_per_kv_token)] if draft else ())

    @property
    def unknown(self) -> str:
        """Why it can price nothing, so that K must be fixed; empty where it can."""
        if not self.verify.is_known:
            return "the verifier has no cost table of two sizes or more"
        return "" if all(curve.is_known for curve in self.drafts) else "a drafter has no cost table"

    def step_ms(self, num_draft_tokens: IntArray, shape: StepShape) -> FloatArray:
        """Milliseconds [n] for each number of verified drafts [n] (B). Only where `unknown` is empty."""
        num_tokens = shape.num_tokens + num_draft_tokens
        verify_ms = self.verify.ms(num_tokens, shape.num_rows, shape.num_kv_tokens, shape.longest_row)
        run_ahead_ms = self.hops.ms(shape.num_rows, 1)
        largest = int(num_tokens.max()) if len(num_tokens) else 0
        if not shape.num_requested:
            parts_ms = np.maximum(verify_ms, run_ahead_ms) if self._runs_ahead else verify_ms + run_ahead_ms
            return parts_ms * self.clock.run_ahead.up_to(largest)[num_tokens]
        rest_ms = self.hops.ms(shape.num_rows, 2) + self.slowest_draft_ms(shape)
        step_ms = self.clock.whole_in_lockstep(verify_ms + rest_ms, self._verify_ms(shape) + rest_ms, num_tokens)
        return step_ms + np.minimum(verify_ms, run_ahead_ms) if shape.leaves_run_ahead and self._runs_ahead else step_ms

    def lockstep_ms(self, num_draft_tokens: IntArray, num_asked: IntArray, shape: StepShape) -> FloatArray:
        """Milliseconds [options, n] of steps in lockstep, without a bubble.

        Args:
            num_draft_tokens: [n] that are verified.
            num_asked: [options, K] see `draft_ms`.
            shape: but for what is asked.
        """
        num_tokens = shape.num_tokens + num_draft_tokens
        verify_ms = self.verify.ms(num_tokens, shape.num_rows, shape.num_kv_tokens, shape.longest_row)
        rest_ms = (self.draft_ms(num_asked, shape) + self.hops.ms(shape.num_rows, 2))[:, None]
        return self.clock.whole_in_lockstep(verify_ms + rest_ms, self._verify_ms(shape) + rest_ms, num_tokens)

    def plain_ms(self, shape: StepShape) -> float:
        """Milliseconds of a step that asks for no drafts: as `step_ms`, of one number."""
        return self.clock.run_ahead.at(shape.num_tokens) * self.plain_parts_ms(shape)

    def plain_parts_ms(self, shape: StepShape) -> float:
        """The same without the factor by the clock."""
        verify_ms, hop_ms = self._verify_ms(shape), self.hops.ms(shape.num_rows, 1)
        return max(verify_ms, hop_ms) if self._runs_ahead else verify_ms + hop_ms

    def budgets_parts_ms(self, most: int, shape: StepShape) -> FloatArray:
        """Milliseconds [most + 1] of a step in lockstep for each number of verified drafts up to `most`, without a bubble and without the factors by
        the clock (`StepClock.in_lockstep`): as `step_ms`, sooner."""
        ms = self.verify.ms_from(shape.num_tokens, most, shape.num_rows, shape.num_kv_tokens, shape.longest_row)
        ms += self.hops.ms(shape.num_rows, 2) + self.slowest_draft_ms(shape)
        return ms

    def lockstep_parts_ms(self, num_draft_tokens: int, shape: StepShape, draft_ms: float) -> tuple[float, float]:
        """What the parts of one step in lockstep should take, where its drafters took so long, and what they would take if no draft were verified."""
        rest_ms = self.hops.ms(shape.num_rows, 2) + draft_ms
        return self._verify_ms(shape, num_draft_tokens) + rest_ms, self._verify_ms(shape) + rest_ms

    def bubble_ms(self, shape: StepShape) -> float:
        """What leaving run-ahead costs such a step."""
        return min(self._verify_ms(shape), self.hops.ms(shape.num_rows, 1)) if self._runs_ahead else 0.0

    def observe(self, num_draft_tokens: int, shape: StepShape, measured: StepMs) -> None:
        """A step has ended: moves the factor of every part that was measured.

        Args:
            num_draft_tokens: that were verified.
            shape: as it was priced, with the numbers of rows and tokens that were sent.
            measured: its parts.
        """
        num_tokens = shape.num_tokens + num_draft_tokens
        verify_ms = self.verify.table_ms_of(num_tokens, shape.num_rows, shape.num_kv_tokens, shape.longest_row)
        self.verify.correction_of(shape.longest_row).observe(num_tokens, verify_ms, measured.verify_ms)
        num_hops = 2 if shape.num_requested else 1
        self.hops.correction_of(num_hops).observe(self.hops.table_ms(shape.num_rows, num_hops), measured.hop_ms)
        if not shape.num_requested:
            return
        draft_ms, drafter = max(self._times_of_asked(shape), key=lambda one: one[0], default=(0.0, None))
        if drafter is not None:
            drafter.correction.observe(draft_ms / drafter.correction.factor, measured.draft_ms)

    def draft_ms(self, num_asked: IntArray, shape: StepShape) -> FloatArray:
        """Milliseconds [n] of the slowest drafter.

        Args:
            num_asked: [n, K] sequences that are asked for more than j drafts, over all drafters; each has its share of them.
            shape: of the step, but for what is asked.
        """
        kv_share, total = _kv_share(shape), sum(shape.num_drafting)
        times = [
            curve.ms_of_asks(num_asked if number == total else -(-num_asked * number // total), kv_share)
            for curve, number in zip(self.drafts, shape.num_drafting, strict=True)
            if number > 0
        ]
        return np.max(times, axis=0) if times else np.zeros(len(num_asked))

    def slowest_draft_ms(self, shape: StepShape) -> float:
        """Milliseconds of the slowest drafter for what this step asks."""
        return max([ms for ms, _ in self._times_of_asked(shape)], default=0.0)

    def _verify_ms(self, shape: StepShape, num_draft_tokens: int = 0) -> float:
        num_tokens = shape.num_tokens + num_draft_tokens
        table_ms = self.verify.table_ms_of(num_tokens, shape.num_rows, shape.num_kv_tokens, shape.longest_row)
        return self.verify.correction_of(shape.longest_row).at(num_tokens) * table_ms

    def _times_of_asked(self, shape: StepShape) -> list[tuple[float, DraftCurve]]:
        """What each drafter takes for its share of what is asked for; none where the lane runs ahead."""
        if not shape.num_requested:
            return []
        kv_share, total = _kv_share(shape), sum(shape.num_drafting)
        num_asked = shape.num_asked or [total] * shape.num_requested
        return [
            (curve.ms_of_ask(num_asked if number == total else [-(-asked * number // total) for asked in num_asked], kv_share), curve)
            for curve, number in zip(self.drafts, shape.num_drafting, strict=True)
            if number > 0
        ]


def _kv_share(shape: StepShape) -> float:
    """KV tokens of a sequence."""
    return shape.num_kv_tokens / max(1, shape.num_rows)


def verify_ms(cost: VerifyCost, num_tokens: int, num_rows: int, num_kv_tokens: int, longest_row: int = 1) -> float:
    """Milliseconds of one round by the table alone, as `VerifyCurve.table_ms`, but without numpy and without checks of the table: for the one
    that reads it at every step. 0 without a table.

    Args:
        longest_row: tokens of its longest prefill chunk; 1 without any.
    """
    if not cost.num_tokens:
        return 0.0
    if cost.chunk_num_tokens and 0 < cost.max_graph_row_tokens < longest_row:
        tokens_ms = _token_ms(cost.chunk_num_tokens, cost.chunk_ms, 0, num_tokens)
    else:
        tokens_ms = _token_ms(cost.num_tokens, cost.step_ms, cost.max_graph_tokens, num_tokens)
    return tokens_ms + cost.ms_per_row * max(0, num_rows - 1) + cost.ms_per_kv_token * num_kv_tokens


def _token_ms(sizes: Sequence[int], times: Sequence[float], padded_up_to: int, num_tokens: int) -> float:
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes):
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[-1] / sizes[-1]
        return times[-1] + slope * (num_tokens - sizes[-1])
    if index == 0 or num_tokens <= padded_up_to or sizes[index - 1] <= padded_up_to:
        return times[index]
    low, high = sizes[index - 1], sizes[index]
    return times[index - 1] + (times[index] - times[index - 1]) * (num_tokens - low) / (high - low)
