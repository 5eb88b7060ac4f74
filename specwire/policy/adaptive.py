"""Adaptive verification: how many drafts to ask for, and which of those that came to verify (docs/design.md section 4).

How a lane's step uses it. `shape` is the step without drafts (specwire.policy.cost.StepShape); rows are the step's decode rows, in one order:

    plan     request = policy.choose_request(shape, num_sampling, most)    most: the ceiling by K, schedule and the round's token limit
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
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specwire.policy.budget import Floats, Ints, choose_budget, survivals
from specwire.policy.calibration import Calibrated, Calibrator
from specwire.policy.candidates import Candidates, find_candidates
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast

_REPLAN_STEPS = 8
"""A choice holds for so many steps, if what is drafted for and computed stays about the same."""
_STAY_STEPS = 16.0
"""Steps over which the bubble of leaving run-ahead is spread, before it is known for how many steps drafting goes on."""
_STAY_BLEND = 0.25
_STAY_RECOVERY = 1 / 256
_PROBE_STRIDE = 16
"""A probe verifies all drafts of one row in so many."""
_NUM_FREE_PROBES = 8
"""The first probes cost no credit: nothing is known yet."""
_MIN_PROBE_LOSS = 0.1
"""Share of a step that a probe is taken to cost at least: even one that seems to cost nothing must not be every other step."""
_YIELD_BLEND = 1 / 32
_FULL_YIELD = 0.97
"""From this yield on, steps are taken to be all alike."""


class DraftRequest(NamedTuple):
    """How many drafts to ask for.

    Args:
        num_drafts: K_request; 0 = nobody is asked, the lane runs ahead.
        is_probe: it does not pay by what is known; it is asked for to keep that true.
        fallback: why it is not chosen by cost, but fixed; empty if it is chosen.
    """

    num_drafts: int
    is_probe: bool = False
    fallback: str = ""


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


@dataclass(slots=True)
class PolicyCounters:
    """Counts since the start.

    Args:
        requested: steps by K_request.
        num_probes: of these steps.
        num_fallbacks: steps whose K was fixed, since costs are not known.
        num_offered, num_kept: drafts that came, and that were verified.
    """

    requested: list[int] = field(default_factory=list)
    num_probes: int = 0
    num_fallbacks: int = 0
    num_offered: int = 0
    num_kept: int = 0


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
        self._hysteresis = hysteresis
        self._probe_share = probe_share
        self._plans = [_Plan(), _Plan()]  # of steps without and with prefill chunks
        self._yield = [1.0, 1.0]  # running means: tokens of steps, and what their time was worth without chunks
        self._credit_ms = 0.0
        self._stay_steps = _STAY_STEPS
        self._num_stayed = 0

    def choose_request(self, shape: StepShape, num_sampling: int, most_drafts: int) -> DraftRequest:
        """K_request: the K of most expected tokens a millisecond, at the best budget for each.

        Args:
            shape: of the step without drafts; its num_requested says nothing.
            num_sampling: sequences that emit a token in it whatever is drafted.
            most_drafts: the ceiling; 0 = no drafts.
        """
        self.forecast.age()
        num_drafting = sum(shape.num_drafting)
        most = min(most_drafts, self.forecast.num_positions) if num_drafting else 0
        if fallback := self.cost.unknown:
            self.counters.num_fallbacks += 1
            return self._counted(DraftRequest(most, fallback=fallback))
        if not most:
            return self._counted(DraftRequest(0))
        plan = self._plan(shape, num_sampling, num_drafting, most)
        self._note_stay(plan.num_drafts > 0)
        self._note_yield(plan)
        if plan.num_drafts == most or not self._probe_share:
            return self._counted(DraftRequest(plan.num_drafts))
        self._credit_ms = min(self._credit_ms + self._probe_share * plan.step_ms, plan.probe_loss_ms)
        if self._credit_ms < plan.probe_loss_ms and self.counters.num_probes >= _NUM_FREE_PROBES:
            return self._counted(DraftRequest(plan.num_drafts))
        self._credit_ms = 0.0
        for each in self._plans:
            each.num_uses = _REPLAN_STEPS  # what it shows may change them
        self.counters.num_probes += 1
        return self._counted(DraftRequest(most, is_probe=True))

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
            plan, worth = self._plans[shape.longest_row > 1], self._current_yield
            tokens_per_ms = plan.best_rate * worth if worth < _FULL_YIELD and plan.best_rate else None
            budget = choose_budget(survivals(calibrated.confidences, num_offered), num_sampling, costs, tokens_per_ms)
            num_kept, expected, cost_ms = budget.num_kept, budget.expected_tokens, budget.cost_ms
        if request.is_probe:
            start = self.counters.num_probes % _PROBE_STRIDE if len(scores) >= _PROBE_STRIDE else self.counters.num_probes % max(1, len(scores))
            num_kept[start::_PROBE_STRIDE] = num_offered[start::_PROBE_STRIDE]
        self.counters.num_offered += num_drafts
        self.counters.num_kept += int(num_kept.sum())
        return Kept(num_kept, calibrated, is_typical, expected, cost_ms)

    def observe(self, kept: Kept, num_accepted: Ints) -> None:
        """A round was answered: of each row [R] how many drafts were accepted; -1 where that is not known."""
        self.forecast.observe(kept.calibrated.confidences[kept.is_typical])
        self.calibrator.observe(kept.calibrated, np.where(num_accepted < 0, 0, kept.num_kept), num_accepted)

    def _plan(self, shape: StepShape, num_sampling: int, num_drafting: int, most: int) -> "_Plan":
        """The plan of such steps; a new one where it is old, or steps have changed."""
        plan = self._plans[shape.longest_row > 1]
        key = (num_drafting, num_sampling, shape.num_tokens)
        plan.num_uses += 1
        if plan.num_uses > _REPLAN_STEPS or plan.most != most or not _are_close(key, plan.key):
            plan.num_uses, plan.most, plan.key = 0, most, key
            self._replan(plan, shape, num_sampling)
        return plan

    def _replan(self, plan: "_Plan", shape: StepShape, num_sampling: int) -> None:
        """Most tokens beyond what the time is worth. Steps that are all alike are worth what the best of them emits; among others, with prefill
        chunks, that is less by the share of time that goes into chunks, and the own rate of a step with a chunk says nothing."""
        num_probed = -(-sum(shape.num_drafting) // _PROBE_STRIDE) * plan.most

        def find(shape: StepShape, tokens_per_ms: float | None = None) -> Candidates:
            return find_candidates(
                self.cost, self.forecast, shape, num_sampling, plan.most,
                stay_steps=self._stay_steps, num_probed=num_probed, tokens_per_ms=tokens_per_ms,
            )  # fmt: skip

        is_mixed = shape.longest_row > 1
        found = find(shape._replace(num_tokens=num_sampling, num_rows=num_sampling, longest_row=1) if is_mixed else shape)
        plan.best_rate = found.best_rate
        worth = plan.best_rate * self._current_yield
        if is_mixed or self._current_yield < _FULL_YIELD:
            found = find(shape, worth)
        values = found.tokens - worth * found.times_ms
        chosen, current = int(np.argmax(values)), min(plan.num_drafts, plan.most)
        if values[chosen] <= values[current] + self._hysteresis * worth * found.times_ms[current]:
            chosen = current
        plan.num_drafts, plan.tokens, plan.step_ms = chosen, float(found.tokens[chosen]), float(found.times_ms[chosen])
        loss_ms = found.probe_ms - (found.tokens[-1] - values[chosen]) / worth
        plan.probe_loss_ms = max(float(loss_ms), _MIN_PROBE_LOSS * plan.step_ms)

    @property
    def _current_yield(self) -> float:
        return min(1.0, self._yield[0] / self._yield[1])

    def _note_yield(self, plan: "_Plan") -> None:
        """By what steps should emit: what they do emit in the end says how good the forecast was, not what chunks cost."""
        for index, value in enumerate((plan.tokens, plan.best_rate * plan.step_ms)):
            self._yield[index] += _YIELD_BLEND * (value - self._yield[index])

    def _note_stay(self, is_drafting: bool) -> None:
        """Follows for how many steps in a row drafting goes on; what that was in the past is forgotten."""
        self._stay_steps += _STAY_RECOVERY * (_STAY_STEPS - self._stay_steps)
        if is_drafting:
            self._num_stayed += 1
        elif self._num_stayed:
            self._stay_steps += _STAY_BLEND * (min(self._num_stayed, 2 * _STAY_STEPS) - self._stay_steps)
            self._num_stayed = 0

    def _counted(self, request: DraftRequest) -> DraftRequest:
        self.counters.requested[request.num_drafts] += 1
        return request


@dataclass(slots=True)
class _Plan:
    """K_request of steps of one kind.

    Args:
        num_drafts: K_request.
        tokens, step_ms: that its step should emit, and take.
        best_rate: tokens a millisecond, were there no prefill chunks.
        probe_loss_ms: what a probe of the most drafts costs more than its tokens are worth.
        most, key: what it was made for; num_uses: how often it was used since.
    """

    num_drafts: int = 0
    tokens: float = 0.0
    step_ms: float = 0.0
    best_rate: float = 0.0
    probe_loss_ms: float = 0.0
    most: int = -1
    key: tuple[int, int, int] = (0, 0, 0)
    num_uses: int = 0


def pack_scores(rows: Sequence[Sequence[float]], num_positions: int) -> tuple[Floats, Ints]:
    """Scores as a matrix [R, K], NaN where there is no draft, and how many each row has [R]."""
    num_offered = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    assert num_offered.max(initial=0) <= num_positions, f"{num_offered.max()} scores of a row, but {num_positions} drafts were asked for"
    scores = np.full((len(rows), num_positions), np.nan)
    scores[np.arange(num_positions) < num_offered[:, None]] = np.fromiter(chain.from_iterable(rows), dtype=np.float64)
    return scores, num_offered


def _are_close(numbers: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Within an eighth of each other."""
    return all(8 * abs(number - other) <= other for number, other in zip(numbers, others, strict=True))
