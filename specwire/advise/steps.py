"""What a step takes, by batch size, K and verified drafts: the services' own tables, corrected by steps that were measured. Pure; numpy only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specwire.messages import CoordinatorStatus
from specwire.policy.budget import Floats, Ints
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.curves import DraftCurve, VerifyCurve

_MAX_BINOMIAL = 64
"""In larger batches the number of sequences that have drafts is near its mean."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Steps that were measured.

    Args:
        num_sequences: in a step, of one lane.
        num_requested: K.
        share, num_drafts: of a sequence's steps that verified drafts, and how many drafts those had.
        step_ms: mean time from step to step.
        context_len: mean tokens of a sequence.
        spread: of several measurements: (longest - shortest) / median.
    """

    num_sequences: int
    num_requested: int
    share: float
    num_drafts: float
    step_ms: float
    context_len: int
    spread: float = 0.0


class StepTimes:
    """Milliseconds of steps of equal sequences, without prefill chunks.

    The logarithm of measured / table is interpolated over the logarithm of the batch size, and stays what it is beyond the points: at first that of
    steps without drafts, so that what the verifier's table has wrong is corrected for all K alike; then, over batch size and K, what is left of it at
    the points with drafts, which go in lockstep with the drafter. Tables that were measured on a busy machine have bumps: a step without drafts takes
    no less than a smaller measured one and no more than a larger one, and a step with drafts no less than one without.

    Args:
        cost: by the tables; where it can price nothing, times are interpolated between the points alone.
        points: at least one with K = 0 and one with K > 0.
        context_len: mean tokens of a sequence that is priced.
    """

    def __init__(self, cost: StepCost, points: Sequence[StepPoint], context_len: int) -> None:
        self._cost = cost
        self._context_len = context_len
        by_k: dict[int, list[StepPoint]] = {}
        for point in sorted(points, key=lambda point: point.num_sequences):
            by_k.setdefault(point.num_requested, []).append(point)
        assert len(by_k.keys() | {0}) == len(by_k) > 1, f"points with K = {sorted(by_k)}, but there must be 0 and another one"
        self.unknown = cost.unknown
        """Why the tables say nothing; empty where they do."""
        self._plain_points = by_k[0]
        self._plain = [math.log(p.num_sequences) for p in by_k[0]], [self._factor(p) for p in by_k[0]]
        self._rest = {
            k: ([math.log(p.num_sequences) for p in by_k[k]], [self._factor(p) - self._plain_factor(p.num_sequences) for p in by_k[k]])
            for k in sorted(by_k)
            if k
        }
        self.largest_measured = max(point.num_sequences for point in points)

    def ms(self, num_sequences: int, num_requested: int, num_draft_tokens: Ints) -> Floats:
        """[n] for numbers of verified drafts [n] of the whole step."""
        factor = math.exp(self._log_factor(num_sequences, num_requested))
        ms = factor * _table_ms(self._cost, num_sequences, num_requested, num_draft_tokens, self._context_len)
        return np.maximum(ms, self._plain_ms(num_sequences)) if num_requested else np.clip(ms, *self._plain_limits(num_sequences))

    def mean_ms(self, num_sequences: int, num_requested: int, share: float, num_drafts: float) -> float:
        """Of steps in which each sequence, by itself, has num_drafts drafts with a probability of `share`, and else none."""
        if not num_requested:
            return self._plain_ms(num_sequences)
        factor = math.exp(self._log_factor(num_sequences, num_requested))
        ms = factor * mean_table_ms(self._cost, num_sequences, num_requested, share, num_drafts, self._context_len)
        return max(ms, self._plain_ms(num_sequences))

    def table_ms(self, point: StepPoint) -> float:
        """What the tables say of a point; 1 where they say nothing."""
        return mean_table_ms(self._cost, point.num_sequences, point.num_requested, point.share, point.num_drafts, point.context_len)

    def _factor(self, point: StepPoint) -> float:
        return math.log(point.step_ms / self.table_ms(point))

    def _log_factor(self, num_sequences: int, num_requested: int) -> float:
        if not num_requested:
            return self._plain_factor(num_sequences)
        rest = [float(np.interp(math.log(num_sequences), *by_size)) for by_size in self._rest.values()]
        return self._plain_factor(num_sequences) + float(np.interp(num_requested, list(self._rest), rest))

    def _plain_ms(self, num_sequences: int) -> float:
        ms = math.exp(self._plain_factor(num_sequences)) * mean_table_ms(self._cost, num_sequences, 0, 0.0, 0.0, self._context_len)
        return float(np.clip(ms, *self._plain_limits(num_sequences)))

    def _plain_limits(self, num_sequences: int) -> tuple[float, float]:
        """Steps without drafts of the next smaller and the next larger measured size: a step of a size between them takes no less and no more."""
        low = max((point.step_ms for point in self._plain_points if point.num_sequences <= num_sequences), default=0.0)
        high = min((point.step_ms for point in self._plain_points if point.num_sequences >= num_sequences), default=math.inf)
        return low, max(low, high)

    def _plain_factor(self, num_sequences: int) -> float:
        return float(np.interp(math.log(num_sequences), *self._plain))


def mean_table_ms(cost: StepCost, num_sequences: int, num_requested: int, share: float, num_drafts: float, context_len: int) -> float:
    """By the tables alone, of steps in which each sequence, by itself, has num_drafts drafts with a probability of `share`, and else none; 1 where
    they say nothing.

    Args:
        context_len: mean tokens of a sequence.
    """
    rows, weights = _binomial(num_sequences, share)
    ms = _table_ms(cost, num_sequences, num_requested, np.rint(rows * num_drafts).astype(np.int64), context_len)
    return float(ms @ weights)


def cost_of_status(status: CoordinatorStatus) -> StepCost:
    """By the tables of the first ready verifier and of all connected drafters."""
    verify = next((lane.verify_cost for lane in status.lanes if lane.is_ready), None)
    assert verify is not None, "a coordinator that serves has a lane that is ready"
    drafters = [drafter for drafter in status.drafters if drafter.is_connected]
    return StepCost(VerifyCurve(verify), [DraftCurve(drafter.draft_cost, drafter.draft_ms_per_kv_token) for drafter in drafters])


def _table_ms(cost: StepCost, num_sequences: int, num_requested: int, num_draft_tokens: Ints, context_len: int) -> Floats:
    if cost.unknown:
        return np.ones(len(num_draft_tokens))
    num_drafters = len(cost.drafts)
    shares = [num_sequences // num_drafters + (index < num_sequences % num_drafters) for index in range(num_drafters)]
    shape = StepShape(num_sequences, num_sequences, num_sequences * context_len, 1, num_requested, shares)
    return cost.step_ms(num_draft_tokens, shape)


def _binomial(number: int, share: float) -> tuple[Floats, Floats]:
    """How many of `number` draws succeed, and the probabilities; the mean alone where that is as good."""
    if number > _MAX_BINOMIAL or not 0 < share < 1:
        return np.array([number * share]), np.ones(1)
    counts = np.arange(number + 1)
    log_choose = math.lgamma(number + 1) - np.array([math.lgamma(count + 1) + math.lgamma(number - count + 1) for count in counts])
    return counts.astype(np.float64), np.exp(log_choose + counts * math.log(share) + (number - counts) * math.log1p(-share))
