"""Adaptive verification in a lane's step: what the policy is told of a step, and what its choices come to. How it chooses is said in
specwire.policy.adaptive."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import numpy as np

from specwire.config import CoordinatorConfig
from specwire.messages import VerifyCost, VerifyResult
from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.budget import Ints
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.curves import VerifyCurve
from specwire.policy.grades import NUM_GRADES, blend_qualities, blend_quality, grade_of, grades_of
from specwire.policy.request import DraftRequest

from .calibration import Calibration
from .choice import Choice
from .drafters import NO_DRAFTS
from .learning import Learner, once_sent

if TYPE_CHECKING:
    from .draft_slot import DraftSlot
    from .lane import Lane
    from .plan import Plan
    from .sequence import Sequence
    from .slots import Round, Slot

    Chunks = list[tuple[Slot, int]]

logger = logging.getLogger(__name__)

_REPEATS = (4, 16, 64)
"""Steps until a probe is repeated that found all drafters catching up: they go on with that meanwhile."""
_OBSERVED_PER_STEP = 16
"""Rows that calibration, forecast and grades learn from, on average: with more of them they learn from one step of a few, since learning must not
take more than its share of the step's time, most of which goes into the start of each computation."""
_FEW_ROWS = 8
"""That are graded one by one sooner than in arrays."""
_PLAIN_STRIDE = 4
"""Of so many steps without drafts, whose time is all that they show, one is learned from."""


class LanePolicy:
    """The policy of one lane while it is connected.

    Args:
        config: hysteresis, and share of probes.
        calibration: of all lanes.
        cost: the verifier's table.
        max_drafts: K_max.
        num_in_flight: rounds in flight (W).
        label: what the log calls the lane.

    Attributes:
        fallback: why K is fixed now; empty if it is not.
    """

    def __init__(
        self, config: CoordinatorConfig, calibration: Calibration, cost: VerifyCost, max_drafts: int, num_in_flight: int, label: str
    ) -> None:
        self.cost = StepCost(VerifyCurve(cost), (), num_in_flight=num_in_flight)
        self.policy = AdaptivePolicy(
            self.cost, calibration.calibrator, max_drafts, hysteresis=config.adaptive_hysteresis, probe_share=config.adaptive_probe_share
        )
        self.fallback = ""
        self._learner = Learner(self.cost, self.policy)
        self._calibration = calibration
        self._label = label
        self._reads_kv = cost.ms_per_kv_token > 0
        self._num_repeats = 0
        self._repeat_at = -1
        self._repeated = DraftRequest(0)

    def choose(self, lane: "Lane", decodes: "list[Sequence]", chunks: "Chunks", most: int) -> Choice | None:
        """How many drafts the next step asks for, up to `most`; None where there is nobody to ask. Asked again for a step, it says the same.

        Args:
            chunks: what it may compute beside its decode rows.
        """
        links = [link for link in lane.links if link.is_usable and link.slots]
        if not decodes or not links or not most:
            return None
        num_drafting = _shares([len(link.slots) for link in links], len(decodes))
        step = lane.next_round
        curves = self.cost.drafts = tuple([link.drafter.curve for link in links])
        most = min(most, max([link.drafter.max_drafts for link in links]))
        shape, num_sampling = self._shape(decodes, chunks, num_drafting, leaves_run_ahead=not lane.is_lockstep)
        request = self.policy.choose_request(step, shape, num_sampling, most, lambda: _count_grades(decodes))
        if step == self._repeat_at and request.num_drafts < self._repeated.num_drafts <= most:
            request = self._repeated
        self._note_fallback(request.fallback)
        stride = max(1 if request.num_drafts else _PLAIN_STRIDE, shape.num_rows // _OBSERVED_PER_STEP)
        is_observed = request.is_probe or request.is_measured or not step % stride
        return Choice(self, step, request, curves, shape, num_sampling, is_observed)

    def settle(self, choice: Choice, decodes: "list[Sequence]", chunks: "Chunks", *, is_drafting: bool) -> None:
        """See `Choice.settle`."""
        old, request = choice.shape, choice.request
        choice.shape, choice.num_sampling = self._shape(decodes, chunks, old.num_drafting, leaves_run_ahead=old.leaves_run_ahead)
        if is_drafting:
            choice.shape = choice.shape._replace(num_requested=request.num_drafts, num_asked=request.num_asked)

    def keep(self, choice: Choice, plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
        """See `Choice.keep`."""
        # Comprehensions, since whatever is done here is done for every row of every step that drafts.
        decodes, most = plan.decodes, plan.num_drafts
        lengths = list(map(len, drafts))
        if lengths != most:
            drafts = [draft[:number] if len(draft) > number else draft for draft, number in zip(drafts, most, strict=True)]
            lengths = list(map(len, drafts))
        rows = choice.rows = range(len(drafts)) if 0 not in lengths else [row for row, draft in enumerate(drafts) if draft is not NO_DRAFTS]
        self._note_answers(choice, plan, bool(rows))
        if not rows:
            return drafts
        is_whole = len(rows) == len(drafts)
        if not is_whole:
            decodes, lengths = [decodes[row] for row in rows], [lengths[row] for row in rows]
        places = [place for sequence in decodes if (place := sequence.draft_slot) is not None]
        assert len(places) == len(rows), f"{len(rows)} sequences have drafts, but {len(places)} a drafter"
        num_offered = choice.num_offered = sum(lengths)
        scores = np.frombuffer(b"".join([place.confidences for place in places]), dtype=np.float32)
        if len(scores) > num_offered:  # of drafts that were cut just now
            cut = [place.confidences[:number] for place, number in zip(places, lengths, strict=True)]
            scores = np.frombuffer(b"".join(cut), dtype=np.float32)
        groups = [place.group for place in places]
        if -1 in groups:
            groups = [self._group(place) for place in places]
        kept = choice.kept = self.policy.choose_kept(
            choice.request, scores, _array(lengths), _array(groups), choice.shape, choice.num_sampling
        )  # fmt: skip
        if choice.is_observed:
            choice.num_asked = np.array([min(place.num_asked, plan.num_drafts[row]) for place, row in zip(places, rows, strict=True)])
            once_sent(lambda: _grade(choice, kept, places))
        numbers = kept.num_kept.tolist()
        choice.budget = sum(numbers)
        if choice.budget < num_offered:
            if is_whole:
                return [draft[:number] if len(draft) > number else draft for draft, number in zip(drafts, numbers, strict=True)]
            for row, number in zip(rows, numbers, strict=True):
                drafts[row] = drafts[row][:number]
        return drafts

    def idle(self) -> None:
        """The lane has nothing to do."""
        self.cost.clock.pause()

    def observe(self, choice: Choice, round_: "Round", result: VerifyResult, tell: Callable[[float, float], None]) -> None:
        """See `Choice.observe`."""
        self._learner.observe(choice, round_, result, tell)

    def _shape(self, decodes: "list[Sequence]", chunks: "Chunks", num_drafting: Rows[int], *, leaves_run_ahead: bool) -> tuple[StepShape, int]:
        """The shape of a step that asks for no drafts, and how many sequences sample in it."""
        num_sampling, num_chunk_tokens, longest = len(decodes), 0, 1
        reads_kv = self._reads_kv or any(curve.reads_kv for curve in self.cost.drafts)
        num_kv_tokens = sum([len(sequence.token_ids) for sequence in decodes]) if reads_kv else 0
        for slot, budget in chunks:
            num_chunk_tokens += budget
            longest = max(longest, budget)
            num_sampling += budget >= slot.num_remaining_tokens
            num_kv_tokens += slot.num_computed_tokens
        shape = StepShape(
            num_tokens=len(decodes) + num_chunk_tokens,
            num_rows=len(decodes) + len(chunks),
            num_kv_tokens=num_kv_tokens,
            longest_row=longest,
            num_drafting=num_drafting,
            leaves_run_ahead=leaves_run_ahead,
        )
        return shape, num_sampling

    def _group(self, place: "DraftSlot") -> int:
        """What kind of drafts a place's are; found once."""
        if place.group >= 0:
            return place.group
        description = place.link.drafter.description
        assert description is not None, "a drafter that has answered has described itself"
        place.group = self._calibration.kind(description)[place.sequence.is_greedy]
        return place.group

    def _note_answers(self, choice: Choice, plan: "Plan", has_answers: bool) -> None:
        """A probe that nobody answered has shown nothing: after many steps without drafts, drafters must catch up first."""
        if choice.request.is_probe and not has_answers and any(plan.num_drafts) and self._num_repeats < len(_REPEATS):
            self._repeat_at, self._repeated = choice.step + _REPEATS[self._num_repeats], choice.request
            self._num_repeats += 1
        else:
            self._num_repeats = 0

    def _note_fallback(self, fallback: str) -> None:
        if fallback != self.fallback:
            self.fallback = fallback
            if fallback:
                logger.warning("%s: adaptive verification has nothing to go by, and K is fixed, since %s", self._label, fallback)
            else:
                logger.info("%s: adaptive verification chooses K", self._label)


def _array(numbers: list[int]) -> Ints:
    """Nearly always of equal numbers, of which an array takes a quarter of the time."""
    first = numbers[0]
    return np.full(len(numbers), first) if numbers.count(first) == len(numbers) else np.array(numbers)


def _shares(numbers: list[int], total: int) -> tuple[int, ...]:
    """About how many of `total` decoding sequences are whose, where so many are open at each drafter; those that still prefill are open, too."""
    num_open = sum(numbers)
    return tuple(numbers) if num_open <= total else tuple([-(-number * total // num_open) for number in numbers])


def _grade(choice: Choice, kept: Kept, places: "list[DraftSlot]") -> None:
    """Gives sequences whose drafters answered new grades; the old ones are kept in the choice."""
    choice.grades = np.array([place.grade for place in places])
    is_lone, step = choice.request.is_lone, choice.step
    if len(places) <= _FEW_ROWS:
        for place, survival, num_asked in zip(places, kept.survival.tolist(), choice.num_asked.tolist(), strict=True):
            place.quality = blend_quality(place.quality, survival, num_asked, is_lone=is_lone)
            place.grade, place.graded_step = grade_of(place.quality), step
        return
    old = np.array([place.quality for place in places])
    qualities = blend_qualities(old, kept.survival, choice.num_asked, is_lone=is_lone)
    for place, quality, grade in zip(places, qualities.tolist(), grades_of(qualities).tolist(), strict=True):
        place.quality, place.grade, place.graded_step = quality, grade, step


def _count_grades(decodes: "list[Sequence]") -> Ints:
    """[grades] sequences of each that have a place at a drafter."""
    grades = [place.grade for sequence in decodes if (place := sequence.draft_slot) is not None]
    return np.bincount(np.array(grades, dtype=np.int64), minlength=NUM_GRADES)
