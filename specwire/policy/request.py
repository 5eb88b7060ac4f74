"""K_request: how many drafts to ask for, and when to ask though it does not pay (docs/design.md section 4)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specwire.policy.budget import Floats, Ints
from specwire.policy.candidates import Candidates, find_candidates, list_options
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.forecast import SurvivalForecast
from specwire.policy.grades import NUM_GRADES
from specwire.policy.probes import MIN_PROBE_LOSS, PLAIN_STEPS, PlainSpells, Probes, num_probed_rows
from specwire.policy.step_plan import MEASURED, NO_REQUEST, DraftRequest, ProbeRoom, StepPlan, are_close, cap_request, request_of

_REPLAN_STEPS = 12
"""A choice holds for so many steps, if what is drafted for and computed stays about the same."""
_IDLE_STEPS = 24
"""The choice to draft nothing does, as long as no drafts have shown anything new."""
_MAX_SPREAD = 0.1
"""Standard deviation of its logarithm up to which the price of a step without drafts, beside those with, is taken for known."""
_DOUBT = 4.0
"""Deviations by which that price would have to be wrong, if drafting pays beyond doubt."""
_STAY_STEPS = 16.0
"""Steps over which the bubble of leaving run-ahead is spread, before it is known for how many steps drafting goes on."""
_STAY_BLEND = 0.25
_STAY_RECOVERY = 1 / 256
_DEEPER_LOSS = 1.5
_PROMISING = 0.75
"""Share of `StepPlan.probe_gain` from which on a probe is followed by others at once."""
_LEAVING_MARGIN = 0.02
"""By so much more must drafting pay to begin: of what chance makes look good, some is not."""
_PRIOR_MARGIN = 0.15
"""The same where no draft was seen yet."""
_LATE_SHARE, _MOST_WAIT_STEPS = 0.5, 4.0
"""Chance that a probe waits in vain, before drafters have answered one; and for how many steps, whatever they are configured to wait."""
_SHORTFALL_ROWS = 512
"""Rows of drafting steps after which what an old one fell short counts 1/e."""
_MAX_SHORTFALL_BLEND = 1 / 16
_SHORTFALL_DECAY = 1 / 256
"""Of what drafting fell short, each step without drafts."""


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

    Attributes:
        probes: when the next one is due.
    """

    def __init__(self, cost: StepCost, forecast: SurvivalForecast, counters: PolicyCounters, *, hysteresis: float, probe_share: float) -> None:
        self.probes = Probes(probe_share)
        self._spells = PlainSpells(probe_share / 4)
        self._cost = cost
        self._forecast = forecast
        self._counters = counters
        self._hysteresis = hysteresis
        self._plans = [StepPlan(), StepPlan()]  # of steps without and with prefill chunks
        self._ahead = StepPlan()  # of steps that are about to come
        self._stay_steps = _STAY_STEPS
        self._num_stayed = 0
        self._gain_ms, self._num_observed = 0.0, 0  # of drafting beside running ahead, since it began
        # Running means of drafting steps: tokens a row beyond what their time is worth, and how many more were promised.
        self._gained, self._missed = 0.0, 0.0
        self._step = -1
        self._request = NO_REQUEST

    def choose(
        self, step: int, shape: StepShape, num_sampling: int, most_drafts: int, count_grades: Callable[[], Ints], room: ProbeRoom
    ) -> DraftRequest:
        """See `specwire.policy.adaptive.AdaptivePolicy.choose_request`."""
        num_drafting = sum(shape.num_drafting)
        most = min(most_drafts, self._forecast.num_positions) if num_drafting else 0
        if step == self._step:
            return cap_request(self._request, most)
        self._step = step
        self._forecast.age()
        self._request = self._choose(shape, num_sampling, most, count_grades, room)
        self._counters.requested[self._request.num_drafts] += 1
        return self._request

    def would_draft(self, shape: StepShape, most_drafts: int, count_grades: Callable[[], Ints]) -> bool:
        """See `specwire.policy.adaptive.AdaptivePolicy.would_draft`."""
        plan, number = self._ahead, shape.num_rows
        most = min(most_drafts, self._forecast.num_positions)
        if not most or self._cost.unknown:
            return most > 0
        key = (sum(shape.num_drafting), number, number)
        plan.num_uses += 1
        if plan.num_uses > _IDLE_STEPS or plan.most != most or not are_close(key, plan.key):
            plan.num_uses, plan.most, plan.key = 0, most, key
            self._replan(plan, shape, number, count_grades() * key[0])
        return plan.request.num_drafts > 0

    def promise(self, shape: StepShape) -> tuple[float, float]:
        """Of the plan of such steps: tokens that a millisecond is worth (0 = not known), and tokens a row that drafts should bring beyond what their
        time is worth, by the forecast alone."""
        plan = self._plans[shape.longest_row > 1]
        return plan.best_rate, plan.promised

    @property
    def _shortfall(self) -> float:
        """Tokens a row that drafting is taken to gain less than is promised; 0 as long as it gains anything."""
        return max(0.0, self._missed) if self._gained < 0 else 0.0

    def _choose(self, shape: StepShape, num_sampling: int, most: int, count_grades: Callable[[], Ints], room: ProbeRoom) -> DraftRequest:
        if fallback := self._cost.unknown:
            self._counters.num_fallbacks += 1
            return DraftRequest(most, fallback=fallback)
        if not most:
            return NO_REQUEST
        plan = self._plan(shape, num_sampling, most, count_grades, room)
        self._note_stay(plan.request.num_drafts > 0)
        if not plan.request.num_drafts:
            self._spells.note_plain()
        elif shape.longest_row == 1 and self._spells.is_due(plan.step_ms, plan.spell_loss_ms, room.is_ending, is_in_doubt=plan.is_in_doubt):
            return MEASURED
        if plan.request.num_drafts == most or not self.probes.is_due(
            plan.step_ms, plan.probe_loss_ms, plan.probe_wait_ms, room.is_ready, is_hopeless=plan.is_hopeless
        ):
            return plan.request
        self.note_news()
        for each in self._plans:
            each.num_uses = _REPLAN_STEPS  # what it shows may change them
        self._counters.num_probes += 1
        return plan.probe

    def _plan(self, shape: StepShape, num_sampling: int, most: int, count_grades: Callable[[], Ints], room: ProbeRoom) -> StepPlan:
        """The plan of such steps; a new one where it is old, or steps have changed."""
        plan, num_drafting = self._plans[shape.longest_row > 1], sum(shape.num_drafting)
        key = (num_drafting, num_sampling, shape.num_tokens)
        plan.num_uses += 1
        hold = _REPLAN_STEPS if plan.has_news or plan.request.num_drafts else _IDLE_STEPS
        # What had seemed to pay is looked at again after one step, two, four, ...
        if plan.num_uses > min(hold, self._num_stayed or hold) or plan.most != most or not are_close(key, plan.key):
            plan.num_uses, plan.most, plan.key, plan.has_news = 0, most, key, False
            counts = count_grades()
            # Sequences that still prefill are counted as drafting, too.
            self._replan(plan, shape, num_sampling, np.rint(counts * (num_drafting / max(1, int(counts.sum())))).astype(np.int64))
            if plan.probe.is_lone:
                priced = shape._replace(num_requested=plan.probe.num_drafts, num_asked=plan.probe.num_asked)
                wait_ms = room.wait_ms(plan.probe.num_drafts, plan.probe.num_asked[0]) - self._cost.slowest_draft_ms(priced)
                plan.probe_wait_ms = _LATE_SHARE * min(max(0.0, wait_ms), _MOST_WAIT_STEPS * plan.step_ms)
        return plan

    def _replan(self, plan: StepPlan, shape: StepShape, num_sampling: int, num_by_grade: Ints) -> None:
        """Most tokens beyond what the time is worth, which is what the best of the steps without prefill chunks emits. Where there are chunks, too:
        a token that is emitted sooner saves time of such a step, and no chunk, since chunks come with requests."""
        current = tuple([min(k, plan.most) for k in plan.request.by_grade or (plan.request.num_drafts,) * NUM_GRADES])
        options = list_options(self._forecast, num_by_grade, plan.most, current)
        num_drafting = int(num_by_grade.sum())

        def find(shape: StepShape, tokens_per_ms: float | None = None) -> Candidates:
            return find_candidates(
                self._cost, self._forecast, shape, num_sampling, options, num_by_grade, stay_steps=self._stay_steps,
                num_probed=num_probed_rows(num_drafting), shortfall=self._shortfall * num_sampling, tokens_per_ms=tokens_per_ms,
            )  # fmt: skip

        is_mixed = shape.longest_row > 1
        found = find(shape._replace(num_tokens=num_sampling, num_rows=num_sampling, longest_row=1) if is_mixed else shape)
        plan.best_rate = worth = found.best_rate
        if is_mixed:
            found = find(shape, worth)
        values = found.tokens - worth * found.times_ms
        chosen = int(np.argmax(values))
        kept = int((options == current).all(axis=1).argmax())
        margin = self._hysteresis if any(current) else max(self._hysteresis, _PRIOR_MARGIN if self._forecast.is_prior else _LEAVING_MARGIN)
        if values[chosen] <= values[kept] + margin * worth * found.times_ms[kept]:
            chosen = kept
        plan.step_ms = float(found.times_ms[chosen])
        plan.request = request_of(options[chosen], num_by_grade)
        plan.promised = float(values[chosen] - values[0]) / num_sampling + self._shortfall
        plan.is_in_doubt = plan.request.num_drafts > 0 and self._is_in_doubt(found, chosen, shape)
        plan.spell_loss_ms = PLAIN_STEPS * float(worth * found.times_ms[0] - num_sampling) / worth + self._cost.bubble_ms(shape)
        is_lone, depth = not plan.request.num_drafts, plan.most
        # Where nothing is drafted beside it, it is not counted upon to bring anything, and looks as deep as that costs little more than two drafts.
        gained_ms = 0.0 if is_lone else (found.tokens - num_sampling) / worth
        num_asked = num_probed_rows(num_drafting)
        probe_ms = self._lone_probe_ms(plan.most, num_asked, shape) if is_lone else found.probe_ms
        losses = np.maximum((probe_ms - (num_sampling - values[chosen]) / worth - gained_ms)[: depth + 1], MIN_PROBE_LOSS * plan.step_ms)
        if is_lone:
            depth = int(np.flatnonzero(losses <= _DEEPER_LOSS * losses[min(2, depth)])[-1])
        plan.probe = DraftRequest(depth, is_probe=True, is_lone=is_lone, num_asked=(num_asked,) * depth if is_lone else ())
        plan.probe_loss_ms = float(losses[depth])
        plan.probe_wait_ms = 0.0
        most_tokens = num_sampling + num_drafting * np.arange(plan.most + 1)  # were all drafts accepted
        plan.is_hopeless = bool((most_tokens - worth * found.all_ms[: plan.most + 1])[1:].max() <= num_sampling - worth * found.times_ms[0])
        plan.probe_gain = float(worth * found.all_ms[depth] - num_sampling) / max(1, num_drafting)

    def _lone_probe_ms(self, most: int, num_asked: int, shape: StepShape) -> Floats:
        """[most + 1] milliseconds of a step that asks so many sequences for 0, 1, ... drafts, and verifies all of some."""
        depths = np.arange(most + 1)
        asked = np.where(depths[:, None] > np.arange(most), num_asked, 0)
        costs = self._cost.lockstep_ms(num_asked * depths, asked, shape)
        return costs.diagonal() + (self._cost.bubble_ms(shape) if shape.leaves_run_ahead else 0.0)

    def _is_in_doubt(self, found: Candidates, chosen: int, shape: StepShape) -> bool:
        """Whether drafting may seem to pay only because the price of a step without drafts is not known well."""
        spread = self._cost.verify.correction_of(shape.longest_row).spread(shape.num_tokens, shape.num_tokens + int(found.budgets[chosen]))
        deviation = math.hypot(spread, self._cost.clock.run_ahead.deviation(shape.num_tokens))
        rates = found.tokens / found.times_ms
        # Not by logarithms: beside chunks, drafting that lost lately may be taken to bring less than no token, and still be the cheaper step.
        return deviation > _MAX_SPREAD and float(rates[chosen]) * math.exp(-_DOUBT * deviation) < float(rates[0])

    def note_news(self) -> None:
        """The forecast has changed."""
        for each in self._plans:
            each.has_news = True

    def observe_probe(self, tokens_per_row: float) -> None:
        """A probe beside which nothing is drafted has shown so many accepted tokens a row."""
        self.probes.observe(is_promising=tokens_per_row >= _PROMISING * self._plans[0].probe_gain)

    def observe_step(self, num_accepted: float, longer_ms: float, worth: float, promised: float, num_sampling: int, num_steps: int = 1) -> None:
        """A step with drafts, no probe, has ended.

        Args:
            num_accepted: of its drafts.
            longer_ms: time that it took more than one without drafts should take.
            worth, promised: `promise` as it was made.
            num_sampling: sequences that emit a token in it whatever is drafted.
            num_steps: of which all these are sums.
        """
        self._gain_ms += num_accepted / worth - longer_ms
        self._num_observed += num_steps
        # Forecasts of drafts that seldom come are too good: of the best steps, and late.
        gained = (num_accepted - worth * longer_ms) / num_sampling
        blend = min(num_sampling / _SHORTFALL_ROWS, _MAX_SHORTFALL_BLEND)
        self._gained += blend * (gained - self._gained)
        self._missed += blend * (promised - gained - self._missed)

    def _note_stay(self, is_drafting: bool) -> None:
        """Follows for how many steps in a row drafting goes on; what that was in the past is forgotten."""
        self._stay_steps += _STAY_RECOVERY * (_STAY_STEPS - self._stay_steps)
        if is_drafting:
            self._num_stayed += 1
            return
        self._gained -= _SHORTFALL_DECAY * self._gained
        self._missed -= _SHORTFALL_DECAY * self._missed
        if self._num_stayed:
            if self._gain_ms < 0:
                self.probes.charge(-self._gain_ms * self._num_stayed / self._num_observed)
            self._gain_ms, self._num_observed = 0.0, 0
            self._stay_steps += _STAY_BLEND * (min(self._num_stayed, 2 * _STAY_STEPS) - self._stay_steps)
            self._num_stayed = 0
