"""What drafts would bring if they were asked for: survivals by grade and position, as they were lately (docs/design.md section 4)."""

import numpy as np

from specwire.policy.budget import Floats, Ints
from specwire.policy.grades import NUM_GRADES, PRIOR_QUALITIES, UNKNOWN

_NUM_BINS = 64
_WINDOW = 512
"""Rows of a grade after which an old one counts 1/e."""
_WINDOW_STEPS = 256
"""Steps after which it does, too, drafted or not: what is seen rarely is seen in time."""
_MIN_WEIGHT = 4.0
_MAX_ROWS = 64
"""Of a step that are looked at."""
_PRIOR_WEIGHT = 8.0
"""Rows that the prior counts for."""


class SurvivalForecast:
    """The distribution of survivals of rows like those of the last steps: a histogram for each grade and each of num_positions draft positions.

    A step that asked for fewer drafts says nothing of later positions directly: a row's confidence there is taken to be the one before it
    times what this ratio was when both were seen. So a change of the drafts' quality shows at once at all positions.

    Attributes:
        is_prior: no draft was seen yet.
    """

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self.is_prior = True
        self._weights: Floats = np.full(NUM_GRADES, _PRIOR_WEIGHT)
        self._next_row = 0
        self._shares: Floats = np.zeros((NUM_GRADES, num_positions, _NUM_BINS))  # of rows, by survival; each position's sum is 1
        self._sums: Floats = np.zeros((NUM_GRADES, num_positions, _NUM_BINS))  # of these rows' survivals
        self._ratios: Floats = np.ones(num_positions)
        self._ratio_weights: Floats = np.full(num_positions, _PRIOR_WEIGHT)
        self._mix: Floats = np.zeros(NUM_GRADES)
        self._mix[UNKNOWN] = 1.0
        for grade, quality in enumerate(PRIOR_QUALITIES):
            for position in range(num_positions):
                survival = quality ** (position + 1)
                self._shares[grade, position, int(survival * _NUM_BINS)] = 1.0
                self._sums[grade, position, int(survival * _NUM_BINS)] = survival

    def observe(self, confidences: Floats, num_asked: Ints, grades: Ints, *, is_lone: bool = False) -> None:
        """Rows [R] that were asked for drafts: their confidences [R, k], 0 where a row has no draft. Of many rows, some in turn.

        is_lone: there was no step with drafts before it for long: what was known counts for little.
        """
        if len(confidences) > _MAX_ROWS:
            taken = np.arange(self._next_row, self._next_row + _MAX_ROWS) % len(confidences)
            self._next_row = int(taken[-1]) + 1
            confidences, num_asked, grades = confidences[taken], num_asked[taken], grades[taken]
        if not confidences.size:
            return
        self.is_prior = False
        self._observe_ratios(confidences, num_asked)
        survival = np.zeros((len(confidences), self.num_positions))
        survival[:, : confidences.shape[1]] = confidences
        for position in range(max(1, int(num_asked.min())), self.num_positions):
            guess = np.minimum(survival[:, position - 1] * self._ratios[position], 1.0)
            survival[:, position] = np.where(position < num_asked, survival[:, position], guess)
        np.multiply.accumulate(survival, axis=1, out=survival)
        bins = np.minimum((survival * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        bins += np.arange(0, self.num_positions * _NUM_BINS, _NUM_BINS)
        bins += (grades * (self.num_positions * _NUM_BINS))[:, None]
        flat = bins.ravel()
        numbers = np.bincount(grades, minlength=NUM_GRADES)
        kept = np.minimum(self._weights, _MIN_WEIGHT if is_lone else _WINDOW)
        total = kept + numbers
        self._weights = np.where(numbers > 0, total, self._weights)
        decay, share = np.where(numbers > 0, kept / total, 1.0)[:, None, None], (1.0 / total)[:, None, None]
        for state, values in ((self._shares, None), (self._sums, survival.ravel())):
            state *= decay
            state += np.bincount(flat, values, minlength=state.size).reshape(state.shape) * share
        self._mix += len(grades) / (_WINDOW + len(grades)) * (numbers / len(grades) - self._mix)

    def age(self) -> None:
        """A step has passed."""
        np.maximum(self._weights * (1 - 1 / _WINDOW_STEPS), _MIN_WEIGHT, out=self._weights)

    def means(self) -> Floats:
        """[grades, K] mean survivals."""
        return self._sums.sum(axis=2)

    def gains(self, budgets: Ints, num_drafting: Ints, options: Ints) -> Floats:
        """Accepted tokens to expect [options, n], of which the best budgets [n] are verified.

        Args:
            num_drafting: [grades] sequences of each.
            options: [options, grades] drafts that each of them is asked for.
        """
        grades = np.arange(NUM_GRADES)
        knots = []
        for state in (self._shares, self._sums):
            by_depth = np.zeros((NUM_GRADES, self.num_positions + 1, _NUM_BINS))
            np.cumsum(state, axis=1, out=by_depth[:, 1:])
            best_first = np.matmul(num_drafting, by_depth[grades, options])[:, ::-1]
            totals = np.zeros((len(options), _NUM_BINS + 2))
            np.cumsum(best_first, axis=1, out=totals[:, 1:-1])
            totals[:, -1] = totals[:, -2]
            knots.append(totals)
        # One interpolation for all options: each has a stretch of its own, at whose end its last total goes on.
        length = 2.0 + max(int(budgets[-1]), int(num_drafting.sum()) * self.num_positions)
        knots[0][:, -1] = length - 1.0
        starts = (np.arange(len(options)) * length)[:, None]
        flat = np.interp((budgets + starts).ravel(), (knots[0] + starts).ravel(), knots[1].ravel())
        return flat.reshape(len(options), len(budgets))

    def acceptance(self) -> list[float]:
        """Mean survival by position: the acceptance rate if all drafts were verified, of sequences as they were lately."""
        return (self._mix @ self.means()).tolist()

    def _observe_ratios(self, confidences: Floats, num_asked: Ints) -> None:
        """Only of rows that have both drafts."""
        width = confidences.shape[1]
        if width < 2:
            return
        has_both = (confidences[:, 1:] > 0) & (np.arange(1, width) < num_asked[:, None])
        numbers = has_both.sum(axis=0)
        later = (confidences[:, 1:] * has_both).sum(axis=0)
        ratios = np.minimum(later / np.maximum((confidences[:, :-1] * has_both).sum(axis=0), 1e-6), 2.0)
        weights = np.minimum(self._ratio_weights[1:width], _WINDOW) + numbers
        self._ratios[1:width] += numbers / weights * (ratios - self._ratios[1:width])
        self._ratio_weights[1:width] = weights
