"""Adaptive verification: how many drafts to ask for, and which of those that came to verify (docs/design.md section 4).

How a lane's step uses it. `shape` is the step without drafts (specwire.policy.cost.StepShape); rows are the step's decode rows, in one order:

    plan     request = policy.choose_request(step, shape, num_sampling, most, count_grades, room)    most: the ceiling by K, schedule and the
             round's token limit. Plans may come to nothing (rounds in flight must be answered before there can be drafts): asked again for the same
             step, it stays. Each row is asked for min(request.by_grade[its grade], what its request, its length and its drafter allow)
    propose
    trim     kept = policy.choose_kept(request, scores, num_offered, groups, shape, num_sampling)    by row: what came, and its kind. A row's drafts
             are cut to kept.num_kept[row]; now and then, sequences get new grades from kept.survival (specwire.policy.grades)
    commit   policy.observe(kept, num_asked, grades, num_accepted)    when the round is answered: by row, num_accepted -1 where it was not, or was
             dropped; of all rounds, or of some

What the steps' parts took goes to `StepCost.observe`, and what whole steps took to `StepClock`, by whoever measures it. One policy belongs to one
lane; a calibrator may be shared by all lanes. All state is changed by these calls alone: equal calls give equal choices. Choices may look at the
drafts' scores only where acceptance compares with the target's own token (`strict`), where no choice can change what is emitted.

Rollouts need no mode of their own: as a batch drains, fewer sequences share a step, its cost stays flat over more tokens, and both choices grow
by themselves, to K_max for the last sequences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specwire.policy.budget import Budget, Floats, Ints, choose_budget, survivals_of_probabilities
from specwire.policy.calibration import Calibrated, Calibrator, Scores
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast
from specwire.policy.grades import NUM_GRADES, UNKNOWN
from specwire.policy.probes import probed_rows
from specwire.policy.request import PolicyCounters, RequestPlanner
from specwire.policy.step_plan import DraftRequest, ProbeRoom

_ALL_READY = ProbeRoom(lambda num_drafts, num_sequences: 0.0, lambda: True)
_LONE_TRIALS = 16.0
"""What a probe that nothing is drafted beside leaves of older observations of its bins."""
_MAX_SURPRISE = 2.0
"""Times as long as it should have taken, that a step counts for at most; and the other way round."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Which drafts to verify.

    Args:
        num_kept: [R] first drafts of each row.
        num_offered: [R] as they came.
        calibrated: what they were judged by.
        survival: [R, K] probabilities that a draft and all before it are accepted; -1 where there is none.
        request: what was asked for.
        num_rows, num_sampling: R of the step, and sequences that emit a token in it whatever is drafted.
        expected_tokens, cost_ms: what the step should emit, and take; 0 where that is not known. parts_ms: the latter without the factor by the
            clock, and if no draft were verified.
        plain_ms: what it would have taken without drafts, as the lane runs ahead.
        worth, promised: see `RequestPlanner.promise`.
        loss_of_all: share of the best budget's tokens a millisecond that verifying all drafts loses; 1 where costs are not known.
        num_steps: of which these are the rows; tokens, times and rows are of all together.
    """

    num_kept: Ints
    num_offered: Ints
    calibrated: Calibrated
    survival: Floats
    request: DraftRequest
    num_rows: int
    num_sampling: int
    expected_tokens: float
    cost_ms: float
    parts_ms: tuple[float, float]
    plain_ms: float
    worth: float
    promised: float
    loss_of_all: float
    num_steps: int = 1

    def take(self, rows: slice) -> "Kept":
        """Only these rows."""
        judged = Calibrated(self.calibrated.confidences[rows], self.calibrated.bins[rows], self.calibrated.groups[rows])
        return replace(
            self, num_kept=self.num_kept[rows], num_offered=self.num_offered[rows], calibrated=judged, survival=self.survival[rows]
        )  # fmt: skip


def merge_kept(steps: Sequence[Kept]) -> Kept:
    """Steps of one request, to be learned from at once, which takes hardly longer than one of few rows."""
    judged = [kept.calibrated for kept in steps]
    number = len(steps)
    return replace(
        steps[-1],
        num_kept=np.concatenate([kept.num_kept for kept in steps]),
        num_offered=np.concatenate([kept.num_offered for kept in steps]),
        calibrated=Calibrated(
            np.concatenate([one.confidences for one in judged]),
            np.concatenate([one.bins for one in judged]),
            np.concatenate([one.groups for one in judged]),
        ),
        survival=np.concatenate([kept.survival for kept in steps]),
        num_rows=sum([kept.num_rows for kept in steps]),
        num_sampling=sum([kept.num_sampling for kept in steps]),
        expected_tokens=sum([kept.expected_tokens for kept in steps]),
        cost_ms=sum([kept.cost_ms for kept in steps]),
        plain_ms=sum([kept.plain_ms for kept in steps]),
        worth=sum([kept.worth for kept in steps]) / number,
        promised=sum([kept.promised for kept in steps]) / number,
        num_steps=number,
    )


class AdaptivePolicy:
    """The two choices of one lane.

    Args:
        cost: of the lane's steps.
        calibrator: of its drafters' scores; for at least max_drafts positions.
        max_drafts: K_max, the most that is ever asked for.
        hysteresis: K_request changes where another one emits so much more a millisecond (0.01 = 1%).
        probe_share: most of the time that probes may cost (0.01 = 1%); 0 = no probes: what stopped to pay is then never tried again.
    """

    def __init__(self, cost: StepCost, calibrator: Calibrator, max_drafts: int, *, hysteresis: float = 0.01, probe_share: float = 0.01) -> None:
        assert max_drafts <= calibrator.num_positions, f"{max_drafts} drafts, but the calibrator has {calibrator.num_positions} positions"
        self.cost = cost
        self.calibrator = calibrator
        self.counters = PolicyCounters([0] * (max_drafts + 1))
        self.forecast = SurvivalForecast(max_drafts)
        self._planner = RequestPlanner(cost, self.forecast, self.counters, hysteresis=hysteresis, probe_share=probe_share)

    def choose_request(
        self,
        step: int,
        shape: StepShape,
        num_sampling: int,
        most_drafts: int,
        count_grades: Callable[[], Ints] | None = None,
        room: ProbeRoom | None = None,
    ) -> DraftRequest:
        """K_request: what emits most expected tokens a millisecond, at the best budget for each.

        Args:
            step: its number; asked again for the same one, the choice stays, but for the ceiling.
            shape: of the step without drafts; its num_requested says nothing.
            num_sampling: sequences that emit a token in it whatever is drafted.
            most_drafts: the ceiling; 0 = no drafts.
            count_grades: [grades] sequences of each, asked for now and then; None: all are unknown.
            room: for probes; None: drafters are in step and never late.
        """
        return self._planner.choose(step, shape, num_sampling, most_drafts, count_grades or _all_unknown, room or _ALL_READY)

    def would_draft(self, shape: StepShape, most_drafts: int) -> bool:
        """Whether such steps would ask for drafts, if all their rows decoded; by what is known now."""
        return self._planner.would_draft(shape, most_drafts, _all_unknown)

    @property
    def is_probe_near(self) -> bool:
        """A probe is about to come."""
        return self._planner.probes.is_near

    def settle_probe(self, lost_ms: float, *, is_answered: bool) -> None:
        """A probe beside which nothing is drafted lost so much by the clock; is_answered: some drafter answered in time."""
        self._planner.probes.settle(lost_ms, is_answered=is_answered)

    def choose_kept(
        self,
        request: DraftRequest,
        scores: Scores,
        num_offered: Ints,
        groups: Ints,
        shape: StepShape,
        num_sampling: int,
        *,
        is_sent: bool = False,
    ) -> Kept:
        """The drafts of the best budget; of a probe, all of a few rows too; all of them where costs are not known. Not for steps without drafts.

        Args:
            request: what `choose_request` chose for this step.
            scores: [drafts] of each row's drafts, row after row, in [0, 1]; NaN: it has none.
            num_offered: [R] drafts that came of each row, no more than it was asked for.
            groups: [R] `Calibrator.group` of each row's drafts.
            shape: of the step as it will be sent, without drafts.
            is_sent: it was sent with all its drafts: they are kept, and only judged.
        """
        calibrated = self.calibrator.calibrate(lay_out(scores, num_offered, request.num_drafts), groups)
        num_drafts = num_tokens = len(scores)
        survival = survivals_of_probabilities(calibrated.confidences, num_offered, num_drafts)
        worth, promised = self._planner.promise(shape)
        loss_of_all = 1.0
        if self.cost.unknown:
            num_kept, expected, cost_ms, parts_ms, plain_ms = num_offered.copy(), 0.0, 0.0, (0.0, 0.0), 0.0
        else:
            priced = shape._replace(num_requested=request.num_drafts, num_asked=request.num_asked)
            parts = self.cost.budgets_parts_ms(num_drafts, priced)
            costs = self.cost.clock.in_lockstep(parts, shape.num_tokens)
            value_of_ms = worth if shape.longest_row > 1 else None
            budget = choose_budget(survival, num_sampling, costs, value_of_ms)
            whole = Budget(num_offered.copy(), num_drafts, num_sampling + float(np.maximum(survival, 0.0).sum()), float(costs[num_drafts]))
            loss_of_all = whole.loss_beside(budget, value_of_ms)
            taken = whole if is_sent else budget
            num_kept, num_tokens, expected, cost_ms = taken.num_kept, taken.num_tokens, taken.expected_tokens, taken.cost_ms
            parts_ms = float(parts[num_tokens]), float(parts[0])
            plain_ms = self.cost.plain_ms(shape)
        if request.is_probe:
            rows = probed_rows(len(num_offered), self.counters.num_probes)
            num_kept[rows] = num_offered[rows]
            num_tokens = int(num_kept.sum())
        self.counters.num_offered += num_drafts
        self.counters.num_kept += num_tokens
        return Kept(
            num_kept, num_offered, calibrated, survival, request, len(num_kept), num_sampling, expected, cost_ms, parts_ms, plain_ms, worth, promised,
            loss_of_all,
        )  # fmt: skip

    def observe(self, kept: Kept, num_asked: Ints, grades: Ints, num_accepted: Ints, clock_ms: float = 0.0) -> None:
        """A round was answered, or some of one request were (`merge_kept`).

        Args:
            kept: of this step, or some of its rows.
            num_asked, grades: [R] drafts that each row was asked for, 1 or more, and its grade then.
            num_accepted: [R] of the drafts that were verified; -1 where that is not known.
            clock_ms: that the step took; 0 = not known, as it should have taken.
        """
        request, is_known = kept.request, num_accepted >= 0
        typical = num_asked >= (np.array(request.by_grade)[grades] if request.by_grade else request.num_drafts)
        confidences = np.where(kept.survival < 0, 0.0, kept.calibrated.confidences)
        self.forecast.observe(confidences[typical], num_asked[typical], grades[typical], is_lone=request.is_lone)
        self._planner.note_news()
        num_verified = np.where(is_known, kept.num_kept, 0)
        self.calibrator.observe(kept.calibrated, num_verified, num_accepted, most_trials=_LONE_TRIALS if request.is_lone else math.inf)
        if not request.is_probe and kept.cost_ms and kept.worth and is_known.any():
            accepted = kept.num_rows * float(num_accepted[is_known].mean())
            # One hiccup must not end drafting.
            took_ms = min(max(clock_ms, kept.cost_ms / _MAX_SURPRISE), kept.cost_ms * _MAX_SURPRISE) if clock_ms else kept.cost_ms
            self._planner.observe_step(accepted, took_ms - kept.plain_ms, kept.worth, kept.promised, kept.num_sampling, kept.num_steps)
        if request.is_lone and len(num_accepted):
            by_scores = np.maximum(kept.survival, 0.0).sum() / len(num_accepted)
            whole = is_known & (kept.num_kept == kept.num_offered)
            by_outcomes = num_accepted[whole].mean() if whole.any() else 0.0
            self._planner.observe_probe(max(float(by_scores), float(by_outcomes)))


def lay_out(scores: Scores, num_offered: Ints, num_positions: int) -> Scores:
    """Scores row after row as a matrix [R, K], 0 where there is no draft."""
    number = len(num_offered)
    if len(scores) == number * num_positions:
        return scores.reshape(number, num_positions)
    matrix = np.zeros((number, num_positions))
    matrix[np.arange(num_positions) < num_offered[:, None]] = scores
    return matrix


def _all_unknown() -> Ints:
    counts = np.zeros(NUM_GRADES, dtype=np.int64)
    counts[UNKNOWN] = 1
    return counts
