"""The decision: from tokens and milliseconds a step to the schedule. Pure; numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specwire.advise.drafts import DraftYield
from specwire.advise.steps import StepTimes
from specwire.policy.budget import Floats, choose_budget
from specwire.policy.schedule import schedule_ranges

ADAPTIVE_MS = 0.15
"""Of the coordinator's own work that a step with adaptive verification takes at most, at 256 sequences of 7 drafts; less of fewer."""
_ADAPTIVE_DRAFTS = 256 * 7
_MIN_BATCHES = 24
_MIN_ROWS = 512
"""Of batches that are drawn for each K."""

_IMPOSSIBLE = (np.inf, np.inf)

Range = tuple[int, int, int]


def fixed_rates(drafts: DraftYield, times: StepTimes, max_num_seqs: int) -> Floats:
    """Tokens a millisecond [max_num_seqs, K + 1] of 1, 2, ... sequences that are all asked for K drafts."""
    rates = np.empty((max_num_seqs, len(drafts.tokens)))
    for index in range(max_num_seqs):
        for k, tokens in enumerate(drafts.tokens):
            rates[index, k] = (index + 1) * tokens / times.mean_ms(index + 1, k, drafts.share[k], drafts.drafts[k])
    return rates


def choose_schedule(rates: Floats, min_gain: float) -> list[Range]:
    """The fewest ranges (start, end, K) of batch sizes in which no size loses more than min_gain against its best K, and none is slower than with
    K = 0; of equally few ones, those with the most tokens a millisecond, where drafts count only for what they gain beyond min_gain.

    Args:
        rates: tokens a millisecond [N, K + 1] of 1..N sequences.
        min_gain: share, such as 0.02, that is worth neither a range of its own nor drafts.
    """
    num_ks = rates.shape[1]
    is_good = (rates * (1 + min_gain) >= rates.max(axis=1, keepdims=True)) & (rates >= rates[:, :1])
    values = np.log(rates)
    values[:, 0] += np.log1p(min_gain)
    # By K of the last size so far: the fewest ranges, minus their value; and the K of the size before.
    costs = [(1, -float(values[0, k])) if is_good[0, k] else _IMPOSSIBLE for k in range(num_ks)]
    origins: list[list[int]] = []
    for size in range(1, len(rates)):
        cheapest = min(range(num_ks), key=costs.__getitem__)
        others = costs[cheapest][0] + 1, costs[cheapest][1]
        origins.append([k if costs[k] <= others else cheapest for k in range(num_ks)])
        costs = [_plus(min(costs[k], others), values[size, k]) if is_good[size, k] else _IMPOSSIBLE for k in range(num_ks)]
    table = [min(range(num_ks), key=costs.__getitem__)]
    for origin in reversed(origins):
        table.append(origin[table[-1]])
    return schedule_ranges([0, *reversed(table)])


def _plus(cost: tuple[float, float], value: float) -> tuple[float, float]:
    return cost[0], cost[1] - float(value)


@dataclass(frozen=True, slots=True)
class AdaptiveGain:
    """Adaptive verification at a batch size.

    Args:
        over_fixed: its tokens a millisecond by those of the best fixed K, minus 1; from the same steps' forecasts.
        drafts_per_row: that it keeps; num_requested: that it asks for.
    """

    num_sequences: int
    over_fixed: float
    num_requested: int
    drafts_per_row: float


def adaptive_gains(survival: Floats, times: StepTimes, sizes: Sequence[int], *, seed: int = 0) -> list[AdaptiveGain]:
    """What choosing the best drafts of all sequences brings, beside the best fixed K of each batch size, 0 included: both in equal batches, which
    are drawn from steps as they were.

    Args:
        survival: [R, K] of steps, as `specwire.advise.drafts.calibrated_survivals` gives it.
    """
    rng = np.random.default_rng(seed)
    return [_adaptive_gain(survival, times, size, rng) for size in sizes]


def _adaptive_gain(survival: Floats, times: StepTimes, num_sequences: int, rng: np.random.Generator) -> AdaptiveGain:
    plain = num_sequences / float(times.ms(num_sequences, 0, np.array([0]))[0])
    chosen, fixed = AdaptiveGain(num_sequences, plain, 0, 0.0), plain
    batches = rng.integers(len(survival), size=(max(_MIN_BATCHES, _MIN_ROWS // num_sequences), num_sequences))
    for k in range(1, survival.shape[1] + 1):
        own_ms = ADAPTIVE_MS * min(1.0, num_sequences * k / _ADAPTIVE_DRAFTS)
        ms = times.ms(num_sequences, k, np.arange(num_sequences * k + 1))
        totals = np.zeros((len(batches), 5))
        for total, batch in zip(totals, batches, strict=True):
            rows = survival[batch, :k]
            budget = choose_budget(rows, num_sequences, ms)
            offered = rows[rows >= 0]
            total[:] = budget.expected_tokens, budget.cost_ms + own_ms, budget.num_tokens, num_sequences + offered.sum(), ms[len(offered)]
        tokens, adaptive_ms, kept, all_tokens, all_ms = totals.sum(axis=0)
        fixed = max(fixed, all_tokens / all_ms)
        if tokens / adaptive_ms > chosen.over_fixed:
            chosen = AdaptiveGain(num_sequences, tokens / adaptive_ms, k, kept / batches.size)
    return replace(chosen, over_fixed=float(chosen.over_fixed / fixed - 1), drafts_per_row=float(chosen.drafts_per_row))


def spread_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to look at: 1, 2, 3, 4, 6, 8, 12, 16, ... and the largest."""
    sizes = {max_num_seqs} | {factor << shift for shift in range(max_num_seqs.bit_length()) for factor in (1, 3)}
    return sorted(size for size in sizes if size <= max_num_seqs)
