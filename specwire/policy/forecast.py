"""What drafts would bring if they were asked for: survivals by position, as they were lately (docs/design.md section 4)."""

import numpy as np

from specwire.policy.budget import Floats, Ints

_NUM_BINS = 64
_WINDOW = 512
"""Rows after which an old one counts 1/e."""
_WINDOW_STEPS = 256
"""Steps after which it does, too, drafted or not: what is seen rarely is seen in time."""
_MIN_WEIGHT = 4.0
_MAX_ROWS = 64
"""Of a step that are looked at."""
_PRIOR_CONFIDENCE = 0.7
_PRIOR_WEIGHT = 8.0
"""Rows that the prior counts for."""


class SurvivalForecast:
    """The distribution of survivals of rows like those of the last steps: a histogram for each of num_positions draft positions.

    A step that asked for fewer drafts says nothing of later positions directly: a row's confidence there is taken to be the one before it
    times what this ratio was when both were seen. So a change of the drafts' quality shows at once at all positions.
    """

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self._weight = _PRIOR_WEIGHT
        self._next_row = 0
        self._shares: Floats = np.zeros((num_positions, _NUM_BINS))  # of rows, by survival; each position's sum is 1
        self._sums: Floats = np.zeros((num_positions, _NUM_BINS))  # of these rows' survivals
        self._ratios: Floats = np.ones(num_positions)
        self._ratio_weights: Floats = np.full(num_positions, _PRIOR_WEIGHT)
        for position in range(num_positions):
            survival = _PRIOR_CONFIDENCE ** (position + 1)
            self._shares[position, int(survival * _NUM_BINS)] = 1.0
            self._sums[position, int(survival * _NUM_BINS)] = survival

    def observe(self, confidences: Floats) -> None:
        """Rows that were asked for k drafts each: their confidences [R, k], 0 where a row has no draft. Of many rows, some in turn."""
        if len(confidences) > _MAX_ROWS:
            taken = np.arange(self._next_row, self._next_row + _MAX_ROWS) % len(confidences)
            self._next_row = int(taken[-1]) + 1
            confidences = confidences[taken]
        num_rows, num_asked = confidences.shape
        if not num_rows or not num_asked:
            return
        self._observe_ratios(confidences)
        survival = np.empty((num_rows, self.num_positions))
        survival[:, :num_asked] = confidences
        for position in range(num_asked, self.num_positions):
            np.minimum(survival[:, position - 1] * self._ratios[position], 1.0, out=survival[:, position])
        np.multiply.accumulate(survival, axis=1, out=survival)
        bins = np.minimum((survival * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        bins += np.arange(0, self._shares.size, _NUM_BINS)
        flat = bins.ravel()
        weight = min(self._weight, _WINDOW)
        self._weight = weight + num_rows
        for state, values in ((self._shares, None), (self._sums, survival.ravel())):
            state *= weight / self._weight
            state += np.bincount(flat, values, minlength=state.size).reshape(state.shape) / self._weight

    def age(self) -> None:
        """A step has passed."""
        self._weight = max(self._weight * (1 - 1 / _WINDOW_STEPS), _MIN_WEIGHT)

    def gains(self, budgets: Ints, num_drafting: int) -> Floats:
        """Accepted tokens to expect [K, n]: of num_drafting sequences asked for 1..K drafts each, of which the best budgets [n] are verified."""
        shares = num_drafting * np.cumsum(self._shares, axis=0)[:, ::-1]
        sums = num_drafting * np.cumsum(self._sums, axis=0)[:, ::-1]
        zeros = np.zeros((self.num_positions, 1))
        numbers = np.concatenate([zeros, np.cumsum(shares, axis=1)], axis=1)
        totals = np.concatenate([zeros, np.cumsum(sums, axis=1)], axis=1)
        return np.stack([np.interp(budgets, number, total) for number, total in zip(numbers, totals, strict=True)])

    def acceptance(self) -> list[float]:
        """Mean survival by position: the acceptance rate if all drafts were verified."""
        return self._sums.sum(axis=1).tolist()

    def _observe_ratios(self, confidences: Floats) -> None:
        """Only of rows that have both drafts."""
        num_asked = confidences.shape[1]
        if num_asked < 2:
            return
        has_both = confidences[:, 1:] > 0
        numbers = has_both.sum(axis=0)
        later = confidences[:, 1:].sum(axis=0)
        ratios = np.minimum(later / np.maximum((confidences[:, :-1] * has_both).sum(axis=0), 1e-6), 2.0)
        weights = np.minimum(self._ratio_weights[1:num_asked], _WINDOW) + numbers
        self._ratios[1:num_asked] += numbers / weights * (ratios - self._ratios[1:num_asked])
        self._ratio_weights[1:num_asked] = weights
