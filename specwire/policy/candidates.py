"""What each choice of drafts to ask for should bring: tokens and milliseconds of the step, at the best budget (docs/design.md section 4)."""

from typing import NamedTuple

import numpy as np

from specwire.policy.budget import Floats, Ints
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast
from specwire.policy.grades import NUM_GRADES, UNKNOWN

_NUM_BUDGETS = 64
"""That are compared for each option."""
_LEAST_SURVIVALS = (0.0, 0.2, 0.35, 0.5, 0.65)
"""Grades are asked for drafts as far as their mean survival is this or more. 0: all are asked for equally many."""


class Candidates(NamedTuple):
    """Steps by what is asked for.

    Args:
        options: [options, grades] drafts that the sequences of each grade are asked for; the first K_max + 1 ask all for 0, 1, ..., K_max.
        budgets: [options] drafts that are verified at best.
        tokens, times_ms: [options] at that.
        probe_ms: [options] of the step that verifies some more tokens, with all of the bubble of leaving run-ahead.
        all_ms: [options] of the step that verifies all drafts.
    """

    options: Ints
    budgets: Ints
    tokens: Floats
    times_ms: Floats
    probe_ms: Floats
    all_ms: Floats

    @property
    def best_rate(self) -> float:
        """Tokens a millisecond."""
        return float((self.tokens / self.times_ms).max())


def list_options(forecast: SurvivalForecast, num_by_grade: Ints, most: int, current: tuple[int, ...]) -> Ints:
    """[options, grades] what to compare: each number of drafts up to `most` for all sequences, or only as deep as a grade's survivals reach.

    Args:
        current: what is asked for until now, which is among them.
    """
    means = forecast.means()[:, :most]
    depths = np.stack([(means >= least).sum(axis=1) for least in _LEAST_SURVIVALS])  # [survivals, grades]
    depths[:, UNKNOWN] = most
    depths[:, num_by_grade == 0] = most  # nobody is in it: it makes no difference, and so no further option
    ks = np.arange(1, most + 1)
    cut = np.minimum(depths[1:, None, :], ks[None, :, None]).reshape(-1, NUM_GRADES)
    same = np.repeat(np.arange(most + 1), NUM_GRADES).reshape(-1, NUM_GRADES)
    others = dict.fromkeys(map(tuple, cut.tolist()))
    others[current] = None
    for option in map(tuple, same.tolist()):
        others.pop(option, None)
    return np.array([*same.tolist(), *others], dtype=np.int64)


def find_candidates(
    cost: StepCost,
    forecast: SurvivalForecast,
    shape: StepShape,
    num_sampling: int,
    options: Ints,
    num_by_grade: Ints,
    *,
    stay_steps: float,
    num_probed: int,
    shortfall: float,
    tokens_per_ms: float | None = None,
) -> Candidates:
    """What comes of each option.

    Args:
        shape: of the step without drafts.
        num_sampling: sequences that emit a token whatever is drafted.
        options: see `list_options`; the first one asks for nothing.
        num_by_grade: [grades] sequences that can have drafts.
        stay_steps: steps over which the bubble of leaving run-ahead is spread.
        shortfall: tokens that drafting is taken to bring less than the forecast promises.
        num_probed: rows of which a probe verifies all drafts, beside its budget.
        tokens_per_ms: see `specwire.policy.budget.choose_budget`.
    """
    most = int(options.max())
    num_drafts = int(num_by_grade.sum()) * most
    budgets = np.arange(0, num_drafts + 1, max(1, num_drafts // _NUM_BUDGETS))
    budgets[-1] = num_drafts
    run_ahead_ms = cost.plain_ms(shape)
    bubble_ms = cost.bubble_ms(shape) if shape.leaves_run_ahead else 0.0
    num_asked = ((options[:, None, :] > np.arange(most)[:, None]) * num_by_grade).sum(axis=2)
    costs = cost.lockstep_ms(budgets, num_asked, shape)
    spread = costs + bubble_ms / stay_steps
    expected = num_sampling + forecast.gains(budgets, num_by_grade, options)
    best = np.argmax(expected / spread if tokens_per_ms is None else expected - tokens_per_ms * spread, axis=1)
    rows = np.arange(len(options))
    tokens, times_ms = expected[rows, best] - shortfall, spread[rows, best]  # budgets are chosen as they will be: by scores alone
    tokens[0], times_ms[0] = num_sampling, run_ahead_ms
    probed = np.minimum(np.searchsorted(budgets, budgets[best] + num_probed * options.max(axis=1)), len(budgets) - 1)
    whole = np.searchsorted(budgets, options @ num_by_grade)
    return Candidates(options, budgets[best], tokens, times_ms, costs[rows, probed] + bubble_ms, spread[rows, whole])
