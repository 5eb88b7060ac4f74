"""K_request: how many drafts to ask for, and when to ask though it does not pay (docs/design.md section 4)."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specwire.policy.candidates import Candidates, find_candidates
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast

_REPLAN_STEPS = 8
"""A choice holds for so many steps, if what is drafted for and computed stays about the same."""
_STAY_STEPS = 16.0
"""Steps over which the bubble of leaving run-ahead is spread, before it is known for how many steps drafting goes on."""
_STAY_BLEND = 0.25
_STAY_RECOVERY = 1 / 256
PROBE_STRIDE = 16
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


class RequestPlanner:
    """The choices of one lane, from what drafts brought lately and what steps cost.

    Args:
        counters: that it counts in.
        hysteresis, probe_share: see specwire.policy.adaptive.AdaptivePolicy.
    """

    def __init__(self, cost: StepCost, forecast: SurvivalForecast, counters: PolicyCounters, *, hysteresis: float, probe_share: float) -> None:
        self._cost = cost
        self._forecast = forecast
        self._counters = counters
        self._hysteresis = hysteresis
        self._probe_share = probe_share
        self._plans = [_Plan(), _Plan()]  # of steps without and with prefill chunks
        self._yield = [1.0, 1.0]  # running means: tokens of steps, and what their time was worth without chunks
        self._credit_ms = 0.0
        self._stay_steps = _STAY_STEPS
        self._num_stayed = 0
        self._step = -1
        self._request = DraftRequest(0)

    def choose(self, step: int, shape: StepShape, num_sampling: int, most_drafts: int) -> DraftRequest:
        """K_request: the K of most expected tokens a millisecond, at the best budget for each.

        Args:
            step: its number; asked again for the same one, the choice stays, but for the ceiling.
            shape: of the step without drafts; its num_requested says nothing.
            num_sampling: sequences that emit a token in it whatever is drafted.
            most_drafts: the ceiling; 0 = no drafts.
        """
        num_drafting = sum(shape.num_drafting)
        most = min(most_drafts, self._forecast.num_positions) if num_drafting else 0
        if step == self._step:
            return self._request._replace(num_drafts=min(self._request.num_drafts, most))
        self._step = step
        self._forecast.age()
        self._request = self._choose(shape, num_sampling, num_drafting, most)
        self._counters.requested[self._request.num_drafts] += 1
        return self._request

    def tokens_per_ms(self, shape: StepShape) -> float | None:
        """What a millisecond of such a step is worth, where steps differ; None where they are all alike, or nothing is known."""
        best_rate, current = self._plans[shape.longest_row > 1].best_rate, self._current_yield
        return best_rate * current if current < _FULL_YIELD and best_rate else None

    @property
    def _current_yield(self) -> float:
        return min(1.0, self._yield[0] / self._yield[1])

    def _choose(self, shape: StepShape, num_sampling: int, num_drafting: int, most: int) -> DraftRequest:
        if fallback := self._cost.unknown:
            self._counters.num_fallbacks += 1
            return DraftRequest(most, fallback=fallback)
        if not most:
            return DraftRequest(0)
        plan = self._plan(shape, num_sampling, num_drafting, most)
        self._note_stay(plan.num_drafts > 0)
        self._note_yield(plan)
        if plan.num_drafts == most or not self._probe_share:
            return DraftRequest(plan.num_drafts)
        self._credit_ms = min(self._credit_ms + self._probe_share * plan.step_ms, plan.probe_loss_ms)
        if self._credit_ms < plan.probe_loss_ms and self._counters.num_probes >= _NUM_FREE_PROBES:
            return DraftRequest(plan.num_drafts)
        self._credit_ms = 0.0
        for each in self._plans:
            each.num_uses = _REPLAN_STEPS  # what it shows may change them
        self._counters.num_probes += 1
        return DraftRequest(most, is_probe=True)

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
        num_probed = -(-sum(shape.num_drafting) // PROBE_STRIDE) * plan.most

        def find(shape: StepShape, tokens_per_ms: float | None = None) -> Candidates:
            return find_candidates(
                self._cost, self._forecast, shape, num_sampling, plan.most,
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


def _are_close(numbers: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Within an eighth of each other."""
    return all(8 * abs(number - other) <= other for number, other in zip(numbers, others, strict=True))
