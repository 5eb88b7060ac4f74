"""Which of the drafts that came adaptive verification has verified, and what it notes of them."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.budget import Ints
from specwire.policy.calibration import Scores
from specwire.policy.cost import StepCost
from specwire.policy.grades import blend_qualities, blend_quality, grade_of, grades_of

from .calibration import Calibration
from .choice import Choice
from .drafters import NO_DRAFTS
from .learning import once_sent

if TYPE_CHECKING:
    from .draft_slot import DraftSlot
    from .plan import Plan

_FEW_ROWS = 8
"""That are graded one by one sooner than in arrays."""
_SETTLED_LOSS = 0.005
"""Share of a step's tokens a millisecond, that verifying all drafts may lose beside the best budget, on average, without being asked first."""
_LOSS_BLEND = 1 / 8
_UNSETTLING_LOSS = 0.1
"""Of one step."""


class Keeper:
    """Of one lane, while it is connected.

    While verifying all that came has lost next to nothing for some steps of about this size, all is verified at once, and what the best budget would
    have been is found while the verifier works: a few small computations less between the drafts and their round.

    Args:
        cost: of its steps.
        policy: chooses.
        calibration: of all lanes.
    """

    def __init__(self, cost: StepCost, policy: AdaptivePolicy, calibration: Calibration) -> None:
        self._cost = cost
        self._policy = policy
        self._calibration = calibration
        self._size, self._loss = (0, 0), 1.0
        """Drafts that are asked for and the order of magnitude of the rows; mean share lost by verifying all."""

    def cut(self, choice: Choice, plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
        """No row more than it was to have; notes those whose drafters answered."""
        # Comprehensions, since whatever is done here is done for every row of every step that drafts.
        most, lengths = plan.num_drafts, list(map(len, drafts))
        if lengths != most:
            drafts = [draft[:number] if len(draft) > number else draft for draft, number in zip(drafts, most, strict=True)]
        choice.rows = range(len(drafts)) if all(drafts) else [row for row, draft in enumerate(drafts) if draft is not NO_DRAFTS]
        return drafts

    def keep(self, choice: Choice, plan: "Plan", drafts: list[list[int]]) -> list[list[int]]:
        """Those worth verifying, of rows that were cut."""
        rows, decodes, most = choice.rows, plan.decodes, plan.num_drafts
        is_whole = len(rows) == len(drafts)
        lengths = list(map(len, drafts))
        if not is_whole:
            decodes, lengths, most = [decodes[row] for row in rows], [lengths[row] for row in rows], [most[row] for row in rows]
        places = [place for sequence in decodes if (place := sequence.draft_slot) is not None]
        assert len(places) == len(rows), f"{len(rows)} sequences have drafts, but {len(places)} a drafter"
        num_offered = choice.num_offered = sum(lengths)
        scores = np.frombuffer(b"".join([place.confidences for place in places]), dtype=np.float32)
        if len(scores) > num_offered:  # of drafts that were cut just now
            cut = [place.confidences[:number] for place, number in zip(places, lengths, strict=True)]
            scores = np.frombuffer(b"".join(cut), dtype=np.float32)
        if self._is_settled(choice, len(rows)):
            choice.budget = num_offered
            once_sent(partial(self._look_back, choice, places, scores, lengths, most))
            return drafts
        kept = self._judge(choice, places, scores, lengths, is_sent=False)
        if choice.is_observed:
            choice.num_asked = _num_asked(places, most)
            once_sent(partial(_grade, choice, kept, places))
        numbers = kept.num_kept.tolist()
        choice.budget = sum(numbers)
        if choice.budget < num_offered:
            if is_whole:
                return [draft[:number] if len(draft) > number else draft for draft, number in zip(drafts, numbers, strict=True)]
            for row, number in zip(rows, numbers, strict=True):
                drafts[row] = drafts[row][:number]
        return drafts

    def _is_settled(self, choice: Choice, num_rows: int) -> bool:
        size = choice.request.num_drafts, num_rows.bit_length()
        if size != self._size:
            self._size, self._loss = size, 1.0
        return self._loss < _SETTLED_LOSS and not choice.request.is_probe and choice.shape.longest_row == 1

    def _judge(self, choice: Choice, places: "list[DraftSlot]", scores: Scores, lengths: list[int], *, is_sent: bool) -> Kept:
        """The best budget, or what all drafts are worth if they were sent; and what sending all loses."""
        groups = [place.group for place in places]
        if -1 in groups:
            groups = [self._group(place) for place in places]
        kept = choice.kept = self._policy.choose_kept(
            choice.request, scores, _array(lengths), _array(groups), choice.shape, choice.num_sampling, is_sent=is_sent
        )  # fmt: skip
        if not choice.request.is_probe:
            self._loss += _LOSS_BLEND * (kept.loss_of_all - self._loss)
            if kept.loss_of_all > _UNSETTLING_LOSS:
                self._loss = 1.0
        return kept

    def _look_back(self, choice: Choice, places: "list[DraftSlot]", scores: Scores, lengths: list[int], most: list[int]) -> None:
        """A step whose drafts were all sent."""
        drafts, self._cost.drafts = self._cost.drafts, choice.curves  # the next step may have others
        try:
            kept = self._judge(choice, places, scores, lengths, is_sent=True)
        finally:
            self._cost.drafts = drafts
        if choice.is_observed:
            choice.num_asked = _num_asked(places, most)
            _grade(choice, kept, places)

    def _group(self, place: "DraftSlot") -> int:
        """What kind of drafts a place's are; found once."""
        if place.group >= 0:
            return place.group
        description = place.link.drafter.description
        assert description is not None, "a drafter that has answered has described itself"
        place.group = self._calibration.kind(description)[place.sequence.is_greedy]
        return place.group


def _num_asked(places: "list[DraftSlot]", most: list[int]) -> Ints:
    return np.array([min(place.num_asked, number) for place, number in zip(places, most, strict=True)])


def _array(numbers: list[int]) -> Ints:
    """Nearly always of equal numbers, of which an array takes a quarter of the time."""
    first = numbers[0]
    return np.full(len(numbers), first) if numbers.count(first) == len(numbers) else np.array(numbers)


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
