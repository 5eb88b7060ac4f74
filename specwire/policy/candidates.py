"""What each K_request should bring: tokens and milliseconds of the step, at the best budget (docs/design.md section 4)."""

from typing import NamedTuple

import numpy as np

from specwire.policy.budget import Floats
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast

_NUM_BUDGETS = 96
"""That are compared for each K."""


class Candidates(NamedTuple):
    """Steps by K_request.

    Args:
        tokens, times_ms: [K + 1] at the best budget.
        probe_ms: of the step with the largest K that verifies some more tokens, with all of the bubble of leaving run-ahead.
    """

    tokens: Floats
    times_ms: Floats
    probe_ms: float

    @property
    def best_rate(self) -> float:
        """Tokens a millisecond."""
        return float((self.tokens / self.times_ms).max())


def find_candidates(
    cost: StepCost,
    forecast: SurvivalForecast,
    shape: StepShape,
    num_sampling: int,
    most: int,
    *,
    stay_steps: float,
    num_probed: int,
    tokens_per_ms: float | None = None,
) -> Candidates:
    """K_request = 0..most.

    Args:
        shape: of the step without drafts.
        num_sampling: sequences that emit a token whatever is drafted.
        stay_steps: steps over which the bubble of leaving run-ahead is spread.
        num_probed: tokens that a probe verifies beside its budget.
        tokens_per_ms: see `specwire.policy.budget.choose_budget`.
    """
    num_drafting = sum(shape.num_drafting)
    budgets = np.unique(np.linspace(0, num_drafting * most, _NUM_BUDGETS).astype(np.int64))
    none = budgets[:1]
    gains = forecast.gains(budgets, num_drafting)
    times, tokens = [float(cost.step_ms(none, shape._replace(num_requested=0))[0])], [float(num_sampling)]
    lockstep = shape._replace(num_requested=1, leaves_run_ahead=False)
    bubble_ms = 0.0
    if shape.leaves_run_ahead:
        bubble_ms = float((cost.step_ms(none, lockstep._replace(leaves_run_ahead=True)) - cost.step_ms(none, lockstep))[0])
    probe_ms = times[0]
    for k in range(1, most + 1):
        costs = cost.step_ms(budgets, lockstep._replace(num_requested=k))
        spread = costs + bubble_ms / stay_steps
        expected = num_sampling + gains[k - 1]
        best = int(np.argmax(expected / spread if tokens_per_ms is None else expected - tokens_per_ms * spread))
        times.append(float(spread[best]))
        tokens.append(float(expected[best]))
        probe = min(int(np.searchsorted(budgets, budgets[best] + num_probed)), len(budgets) - 1)
        probe_ms = float(costs[probe]) + bubble_ms
    return Candidates(np.array(tokens), np.array(times), probe_ms)
