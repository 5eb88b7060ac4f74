"""Confidences: what a drafter's raw scores are worth as probabilities of acceptance, learned while serving (docs/design.md section 4).

A raw score in [0, 1] is turned into log-odds and falls into one of 50 bins; drafts without a score have one of their own. Per (method, greedy or
sampled, position) and bin, observations are counted, and forgotten slowly; the estimates are the bins' shares of accepted drafts, shrunk towards a
prior and made non-decreasing in the score (isotonic regression). The prior of the first position is sigmoid(0.5 x log-odds - 0.2), that of a later
one the estimate before it.

Why not a logistic curve of two parameters per position: in simulated streams both had an expected calibration error below 1% where the truth
is logistic, but where it is not, the curve stayed at 5.5% (two kinds of requests, scores with noise), 2.5% (match lengths) and 13% (a
threshold), the bins at 0.5%, 0.5% and 1.0%. Over the first thousand observations, the error was 2% to 5% with the bins, 2% to 14% with the curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specwire.policy.budget import Floats, Ints

Scores = NDArray[np.float32] | Floats

_LOW, _HIGH, _WIDTH = -4.0, 8.0, 0.25
_NUM_SCORE_BINS = int((_HIGH - _LOW) / _WIDTH) + 2
NUM_BINS = 1 + _NUM_SCORE_BINS
"""The first one of drafts without a score; then those of log-odds from -4 to 8, and one at each end. Wider ones would take the matches of three and
of four tokens for the same."""
_CENTERS = np.linspace(_LOW - _WIDTH / 2, _HIGH + _WIDTH / 2, _NUM_SCORE_BINS)
_PRIOR: Floats = 1 / (1 + np.exp(0.2 - 0.5 * np.concatenate([[0.0], _CENTERS])))
_PRIOR_WEIGHT = 0.5
"""Observations that a bin's prior counts for."""
_GRID_SIZE = 1 << 14
"""Scores are rounded down to as many steps: a look-up takes a third of the time of logarithms, and no bin is narrower than a step."""
WINDOW = 2048
"""Observations of a position after which an old one counts 1/e."""
_NUM_ERROR_BINS = 10
_MIN_STEPS = 16
_MIN_NEW = 32


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Scores of a step's drafts, as probabilities.

    Args:
        confidences: [R, K] P(accepted, if all before it are).
        bins: [R, K], groups: [R]: what `Calibrator.observe` needs to learn from the outcome.
    """

    confidences: Floats
    bins: NDArray[np.int16]
    groups: Ints


@dataclass(frozen=True, slots=True)
class CalibrationStatistics:
    """How well confidences of one kind of drafts hit, over the last few thousand observations of a position.

    Args:
        calibration_error: mean of |predicted - observed| over ten bins of the prediction (ECE), predictions made before the outcome was known.
        calibration_error_by_position, acceptance_by_position, num_observed_by_position: as far as there are observations; counts without decay.
    """

    method: str
    is_greedy: bool
    calibration_error: float
    calibration_error_by_position: tuple[float, ...]
    acceptance_by_position: tuple[float, ...]
    num_observed_by_position: tuple[int, ...]


def _bins_of_grid() -> NDArray[np.int16]:
    """Bins of the scores 0, 1 / _GRID_SIZE, ..., 1, and, as the last one, of none."""
    scores = np.arange(_GRID_SIZE + 1) / _GRID_SIZE
    with np.errstate(divide="ignore"):
        places = (np.log(scores / (1 - scores)) - _LOW) / _WIDTH
    return np.append(2 + np.floor(np.clip(places, -1, _NUM_SCORE_BINS - 2)), 0).astype(np.int16)


_BINS = _bins_of_grid()


class Calibrator:
    """Estimates for up to num_positions draft positions (K).

    Attributes:
        trials, accepted: [groups, K, bins] decayed counts.
    """

    def __init__(self, num_positions: int) -> None:
        assert num_positions > 0, f"{num_positions} positions"
        self.num_positions = num_positions
        self.groups: list[tuple[str, bool]] = []
        self.trials: Floats = np.zeros((0, num_positions, NUM_BINS))
        self.accepted: Floats = np.zeros((0, num_positions, NUM_BINS))
        self._num_observed: Ints = np.zeros((0, num_positions), dtype=np.int64)
        self._errors: Floats = np.zeros((3, 0, num_positions, _NUM_ERROR_BINS))  # observations, sums of predictions, sums of outcomes
        self._values: Floats = np.zeros((0, num_positions, NUM_BINS))
        self._first_places = np.arange(num_positions) * NUM_BINS
        self._num_steps = 0
        self._num_new = 0

    def group(self, method: str, *, is_greedy: bool) -> int:
        """The index of a kind of drafts, new at its first use.

        Args:
            method: whose scores they are; drafters whose scores mean different things need different names.
            is_greedy: the sequence's temperature is 0.
        """
        key = (method, is_greedy)
        if key in self.groups:
            return self.groups.index(key)
        self.groups.append(key)
        one = (1, self.num_positions)
        self.trials = np.concatenate([self.trials, np.zeros((*one, NUM_BINS))])
        self.accepted = np.concatenate([self.accepted, np.zeros((*one, NUM_BINS))])
        self._num_observed = np.concatenate([self._num_observed, np.zeros(one, dtype=np.int64)])
        self._errors = np.concatenate([self._errors, np.zeros((3, *one, _NUM_ERROR_BINS))], axis=1)
        self._values = np.concatenate([self._values, np.zeros((*one, NUM_BINS))])
        self._estimate(len(self.groups) - 1)
        return len(self.groups) - 1

    def calibrate(self, scores: Scores, groups: Ints) -> Calibrated:
        """Raw scores [R, k <= K] in [0, 1] (more counts as 1, less and NaN as none) of rows of these groups [R]."""
        num_positions = scores.shape[1]
        assert num_positions <= self.num_positions, f"{num_positions} positions, but there are {self.num_positions}"
        grid = scores * _GRID_SIZE
        np.fmax(grid, -1.0, out=grid)  # of NaN and -1 it takes the -1
        np.minimum(grid, _GRID_SIZE, out=grid)
        bins = _BINS.take(grid.astype(np.int32))
        places = bins + self._first_places[:num_positions]
        if len(self.groups) > 1:
            places += (groups * (self.num_positions * NUM_BINS))[:, None]
        return Calibrated(self._values.ravel().take(places), bins, groups)

    def observe(self, drafts: Calibrated, num_verified: Ints, num_accepted: Ints, *, most_trials: float = math.inf) -> None:
        """Learns from a step's outcome: of each row [R], how many drafts were verified, and how many of these were accepted.

        Positions behind a rejection, or behind the verified ones, say nothing. A row whose outcome is not known has 0 verified drafts.
        most_trials: what older observations of the same bins count for at most.
        """
        positions = np.arange(drafts.bins.shape[1])
        is_observed = (positions < num_verified[:, None]) & (positions <= num_accepted[:, None])
        rows, columns = np.nonzero(is_observed)
        if not len(rows):
            return
        is_accepted = (columns < num_accepted[rows]).astype(np.float64)
        places = drafts.groups[rows] * self.num_positions + columns
        num_places = len(self.groups) * self.num_positions
        num_new = np.bincount(places, minlength=num_places).reshape(self._num_observed.shape)
        self._num_observed += num_new
        decay = ((1 - 1 / WINDOW) ** num_new)[:, :, None]
        for counts in (self.trials, self.accepted, *self._errors):
            counts *= decay
        bins = places * NUM_BINS + drafts.bins[rows, columns]
        if most_trials < math.inf:
            seen = np.unique(bins)
            keep = np.minimum(1.0, most_trials / np.maximum(self.trials.ravel()[seen], most_trials))
            for counts in (self.trials, self.accepted):
                counts.ravel()[seen] *= keep
        self.trials += np.bincount(bins, minlength=self.trials.size).reshape(self.trials.shape)
        self.accepted += np.bincount(bins, is_accepted, minlength=self.trials.size).reshape(self.trials.shape)
        self._observe_errors(places, drafts.confidences[rows, columns], is_accepted)
        self._num_steps += 1
        self._num_new += len(rows)
        # Often while there is little data, then rarely: new estimates cost more than all else here.
        if most_trials < math.inf or (self._num_steps >= _MIN_STEPS and self._num_new >= _MIN_NEW) or self._num_new >= self.trials.sum() / 2:
            self._num_steps = self._num_new = 0
            for group in np.unique(drafts.groups[rows]):
                self._estimate(int(group))

    def restore(self, groups: Sequence[tuple[str, bool]], trials: Floats, accepted: Floats) -> None:
        """Takes over counts [groups, K, bins] that were kept (specwire.policy.calibration_file)."""
        for index, (method, is_greedy) in enumerate(groups):
            place = self.group(method, is_greedy=is_greedy)
            self.trials[place], self.accepted[place] = trials[index], accepted[index]
            self._estimate(place)

    def statistics(self) -> list[CalibrationStatistics]:
        """Of every group with observations."""
        return [self._group_statistics(group) for group in range(len(self.groups)) if self._num_observed[group].any()]

    def _observe_errors(self, places: Ints, predictions: Floats, outcomes: Floats) -> None:
        shape = self._errors.shape[1:]
        bins = places * _NUM_ERROR_BINS + np.minimum((predictions * _NUM_ERROR_BINS).astype(np.int64), _NUM_ERROR_BINS - 1)
        for index, weights in enumerate((None, predictions, outcomes)):
            self._errors[index] += np.bincount(bins, weights, minlength=shape[0] * shape[1] * shape[2]).reshape(shape)

    def _estimate(self, group: int) -> None:
        prior = _PRIOR
        for position in range(self.num_positions):
            if self.trials[group, position].any():
                weights = self.trials[group, position] + _PRIOR_WEIGHT
                shares = (self.accepted[group, position] + _PRIOR_WEIGHT * prior) / weights
                prior = np.concatenate([shares[:1], isotonic(shares[1:], weights[1:])])
            self._values[group, position] = prior

    def _group_statistics(self, group: int) -> CalibrationStatistics:
        last = int(np.flatnonzero(self._num_observed[group])[-1]) + 1
        numbers, predicted, observed = self._errors[:, group, :last]
        totals = np.maximum(numbers.sum(axis=1), 1e-9)
        errors = np.abs(predicted - observed).sum(axis=1)
        method, is_greedy = self.groups[group]
        return CalibrationStatistics(
            method,
            is_greedy,
            calibration_error=float(errors.sum() / totals.sum()),
            calibration_error_by_position=tuple((errors / totals).tolist()),
            acceptance_by_position=tuple((observed.sum(axis=1) / totals).tolist()),
            num_observed_by_position=tuple(self._num_observed[group, :last].tolist()),
        )


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing sequence [n] closest to the values in weighted squares, by pooling neighbours that violate the order."""
    means: list[float] = []
    totals: list[float] = []
    sizes: list[int] = []
    # Lists: for 50 values they take a fifth of the time of the closed formula in arrays.
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, size = value, weight, 1
        while means and means[-1] > mean:
            left, size = totals.pop(), size + sizes.pop()
            mean = (left * means.pop() + total * mean) / (left + total)
            total += left
        means.append(mean)
        totals.append(total)
        sizes.append(size)
    return np.repeat(means, sizes)
