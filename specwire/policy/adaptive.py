"""Adaptive verification: how many drafts to ask for, and which of those that came to verify (docs/design.md section 4).

How a lane's step uses it. `shape` is the step without drafts (specwire.policy.cost.StepShape); rows are the step's decode rows, in one order:

    plan     request = policy.choose_request(step, shape, num_sampling, most)    most: the ceiling by K, schedule and the round's token limit
             plans may come to nothing (rounds in flight must be answered before there can be drafts): asked again for the same step, it stays
             each row is asked for min(request.num_drafts, what its request, its length and its drafter allow)
    propose
    trim     kept = policy.choose_kept(request, scores, num_asked, groups, shape, num_sampling)    by row: what came, was asked for, is its kind
             a row's drafts are cut to kept.num_kept[row]
    commit   policy.observe(kept, num_accepted)    once a round, when it is answered: by row, -1 where it was not answered, or was dropped

What the steps took goes to `StepCost.observe`, by whoever measures it. One policy belongs to one lane; a calibrator may be shared by all lanes.
All state is changed by these calls alone: equal calls give equal choices. Choices may look at the drafts' scores only where acceptance compares
with the target's own token (`strict`), where no choice can change what is emitted.

Rollouts need no mode of their own: as a batch drains, fewer sequences share a step, its cost stays flat over more tokens, and both choices grow
by themselves, to K_max for the last sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from specwire.policy.budget import Floats, Ints, choose_budget, survivals
from specwire.policy.calibration import Calibrated, Calibrator
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast
from specwire.policy.request import PROBE_STRIDE, DraftRequest, PolicyCounters, RequestPlanner


@dataclass(frozen=True, slots=True)
class Kept:
    """Which drafts to verify.

    Args:
        num_kept: [R] first drafts of each row.
        calibrated: what they were judged by.
        is_typical: [R] rows that were asked for all drafts of the step.
        expected_tokens, cost_ms: what the step should emit, and take; 0 where that is not known.
    """

    num_kept: Ints
    calibrated: Calibrated
    is_typical: NDArray[np.bool_]
    expected_tokens: float
    cost_ms: float


class AdaptivePolicy:
    """The two choices of one lane.

    Args:
        cost: of the lane's steps.
        calibrator: of its drafters' scores; for at least max_drafts positions.
        max_drafts: K_max, the most that is ever asked for.
        hysteresis: K_request changes where another one emits so much more a millisecond (0.01 = 1%).
        probe_share: most of the time that probes may cost (0.005 = 0.5%); 0 = no probes: what stopped to pay is then never tried again.
    """

    def __init__(self, cost: StepCost, calibrator: Calibrator, max_drafts: int, *, hysteresis: float = 0.01, probe_share: float = 0.005) -> None:
        assert max_drafts <= calibrator.num_positions, f"{max_drafts} drafts, but the calibrator has {calibrator.num_positions} positions"
        self.cost = cost
        self.calibrator = calibrator
        self.counters = PolicyCounters([0] * (max_drafts + 1))
        self.forecast = SurvivalForecast(max_drafts)
        self._planner = RequestPlanner(cost, self.forecast, self.counters, hysteresis=hysteresis, probe_share=probe_share)

    def choose_request(self, step: int, shape: StepShape, num_sampling: int, most_drafts: int) -> DraftRequest:
        """K_request: the K of most expected tokens a millisecond, at the best budget for each.

        Args:
            step: its number; asked again for the same one, the choice stays, but for the ceiling.
            shape: of the step without drafts; its num_requested says nothing.
            num_sampling: sequences that emit a token in it whatever is drafted.
            most_drafts: the ceiling; 0 = no drafts.
        """
        return self._planner.choose(step, shape, num_sampling, most_drafts)

    def choose_kept(
        self,
        request: DraftRequest,
        scores: Sequence[Sequence[float]],
        num_asked: Sequence[int],
        groups: Sequence[int],
        shape: StepShape,
        num_sampling: int,
    ) -> Kept:
        """The drafts of the best budget; of a probe, all of a few rows too; all of them where costs are not known. Not for steps without drafts.

        Args:
            request: what `choose_request` chose for this step.
            scores: of each row's drafts, one each, no more than asked for, in [0, 1]; NaN counts as certain to fail. A drafter without scores:
                0.5 each.
            num_asked: drafts that each row was asked for.
            groups: `Calibrator.group` of each row's drafts.
            shape: of the step as it will be sent, without drafts.
        """
        packed, num_offered = pack_scores(scores, request.num_drafts)
        calibrated = self.calibrator.calibrate(packed, np.array(groups, dtype=np.int64))
        is_typical = np.array(num_asked, dtype=np.int64) == request.num_drafts
        num_drafts = int(num_offered.sum())
        if self.cost.unknown:
            num_kept, expected, cost_ms = num_offered, 0.0, 0.0
        else:
            priced = shape._replace(num_requested=request.num_drafts, leaves_run_ahead=False)
            costs = self.cost.step_ms(np.arange(num_drafts + 1), priced)
            budget = choose_budget(survivals(calibrated.confidences, num_offered), num_sampling, costs, self._planner.tokens_per_ms(shape))
            num_kept, expected, cost_ms = budget.num_kept, budget.expected_tokens, budget.cost_ms
        if request.is_probe:
            start = self.counters.num_probes % PROBE_STRIDE if len(scores) >= PROBE_STRIDE else self.counters.num_probes % max(1, len(scores))
            num_kept[start::PROBE_STRIDE] = num_offered[start::PROBE_STRIDE]
        self.counters.num_offered += num_drafts
        self.counters.num_kept += int(num_kept.sum())
        return Kept(num_kept, calibrated, is_typical, expected, cost_ms)

    def observe(self, kept: Kept, num_accepted: Ints) -> None:
        """A round was answered: of each row [R] how many drafts were accepted; -1 where that is not known."""
        self.forecast.observe(kept.calibrated.confidences[kept.is_typical])
        self.calibrator.observe(kept.calibrated, np.where(num_accepted < 0, 0, kept.num_kept), num_accepted)


def pack_scores(rows: Sequence[Sequence[float]], num_positions: int) -> tuple[Floats, Ints]:
    """Scores as a matrix [R, K], NaN where there is no draft, and how many each row has [R]."""
    num_offered = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    assert num_offered.max(initial=0) <= num_positions, f"{num_offered.max()} scores of a row, but {num_positions} drafts were asked for"
    num_scores = int(num_offered.sum())
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=num_scores)
    if num_scores == len(rows) * num_positions:
        return flat.reshape(len(rows), num_positions), num_offered
    scores = np.full((len(rows), num_positions), np.nan)
    scores[np.arange(num_positions) < num_offered[:, None]] = flat
    return scores, num_offered
