"""How far a verifier's measured table is off while it serves, by the size of the round: its shape, too, may be wrong (design section 4). numpy only.

A table that was measured while others used the machine, or whose few seconds were too short, is not only too high. Which sizes cost how much more
than others decides how many drafts pay. So there is a factor for 1, 2, 4, ... tokens, interpolated over the logarithm of the size, and what one size
shows is believed of others the more the nearer they are: a Kalman filter over the logarithms of the factors, whose prior is a random walk from size
to size with an unknown start.
"""

import math

import numpy as np
from numpy.typing import NDArray

from specwire.policy.correction import MAX_SURPRISE, PredictionErrors

Floats = NDArray[np.float64]

_NUM_KNOTS = 13
"""From 1 to 4096 tokens; larger rounds have the last one's factor."""
LEVEL_DEVIATION, STEP_DEVIATION = 1.0, 0.25
"""Prior standard deviations of the logarithms of all factors together, and of those between a size and twice as many tokens."""
_LEAST_NOISE = 0.1**2
"""Variance of a measurement's logarithm, at first and at least. It is followed: on a busy machine one time says little."""
_NOISE_RATE = 1 / 32
FORGETTING = 0.0026
"""Share of the prior that returns with each step, where the noise is 1: so that in the long run a step moves its size's factor by 5%, as it does a
slow factor, whatever the noise."""
_STEPS = np.minimum.outer(np.arange(_NUM_KNOTS), np.arange(_NUM_KNOTS))
_LIMIT = math.log(64.0)
_NONE: Floats = np.zeros(0)


class ShapeCorrection:
    """Factors by number of tokens, from 1/64 to 64; 1 before the first measurement.

    Args:
        forgetting: share of the prior that returns with each measurement, where the noise is 1.
        step_deviation, level_deviation: of the prior, see above.

    Attributes:
        factor: that of the last measured size.
        errors: of predictions with the factors of their time.
    """

    __slots__ = ("_covariance", "_dense", "_forgetting", "_last", "_log_sizes", "_logs", "_noise", "_prior", "errors", "factor")

    def __init__(self, forgetting: float = FORGETTING, step_deviation: float = STEP_DEVIATION, level_deviation: float = LEVEL_DEVIATION) -> None:
        self._forgetting = forgetting
        self.factor = 1.0
        self.errors = PredictionErrors()
        self._noise = _LEAST_NOISE
        self._last = -1, 0.0  # the knot and the surprise of the last round
        self._logs: Floats = np.zeros(_NUM_KNOTS)
        self._prior: Floats = level_deviation**2 + step_deviation**2 * _STEPS
        self._covariance: Floats = self._prior.copy()
        self._log_sizes: Floats = _NONE
        self._dense: Floats = _NONE  # of as many sizes as were asked for since the last round

    def observe(self, num_tokens: int, table_ms: float, measured_ms: float, *, deviation: float = 0.0) -> None:
        """One round of so many tokens: what the table says, without factors, and what was measured. Nothing where either is not a positive finite
        number.

        Args:
            deviation: standard deviation of the measurement's logarithm at least; such a one says nothing of the noise of others. 0: as noisy as
                they are.
        """
        if not (0.0 < table_ms < math.inf and 0.0 < measured_ms < math.inf):
            return
        knot, weight = _place(num_tokens)
        log_factor = self._log_factor(knot, weight)
        self.errors.observe(math.exp(log_factor) * table_ms, measured_ms)
        surprise = min(max(math.log(measured_ms / table_ms) - log_factor, -MAX_SURPRISE), MAX_SURPRISE)
        self._covariance += self._forgetting * self._noise * (self._prior - self._covariance)
        with_size = (1.0 - weight) * self._covariance[knot] + weight * self._covariance[knot + 1]
        variance = float((1.0 - weight) * with_size[knot] + weight * with_size[knot + 1])
        gain = with_size / (variance + max(self._noise, deviation**2))
        # By how surprises of about one size differ: what they share is still to be learned, and no noise.
        if knot == self._last[0] and not deviation:
            self._noise = max(_LEAST_NOISE, self._noise + _NOISE_RATE * ((surprise - self._last[1]) ** 2 / 2 - self._noise))
        self._last = -1 if deviation else knot, surprise
        self._logs += gain * surprise
        np.minimum(self._logs, _LIMIT, out=self._logs)
        np.maximum(self._logs, -_LIMIT, out=self._logs)
        self._covariance -= gain[:, None] * with_size
        self._dense = _NONE
        self.factor = math.exp(self._log_factor(knot, weight))

    def age(self, share: float) -> None:
        """Time has passed without measurements: this share of the prior returns, the factors stay."""
        self._covariance += share * (self._prior - self._covariance)

    def at(self, num_tokens: int) -> float:
        """The factor of one size."""
        return math.exp(self._log_factor(*_place(num_tokens)))

    def spread(self, num_tokens: int, others: int) -> float:
        """How far the quotient of the factors of two sizes may be off: the standard deviation of its logarithm."""
        weights = np.zeros(_NUM_KNOTS)
        for size, sign in ((num_tokens, -1.0), (others, 1.0)):
            knot, weight = _place(size)
            weights[knot] += sign * (1.0 - weight)
            weights[knot + 1] += sign * weight
        return math.sqrt(max(0.0, float(weights @ self._covariance @ weights)))

    def deviation(self, num_tokens: int) -> float:
        """How far the factor of one size may be off: the standard deviation of its logarithm."""
        knot, weight = _place(num_tokens)
        lower, upper = (1.0 - weight) ** 2 * self._covariance[knot, knot], weight**2 * self._covariance[knot + 1, knot + 1]
        return math.sqrt(max(0.0, float(lower + upper + 2.0 * weight * (1.0 - weight) * self._covariance[knot, knot + 1])))

    def up_to(self, largest: int) -> Floats:
        """The factors of 0, 1, ..., `largest` tokens, and of some more; not to be written."""
        if largest >= len(self._dense):
            if largest >= len(self._log_sizes):
                self._log_sizes = log_sizes(2 * largest + 1)
            self._dense = self.of(self._log_sizes[: largest + 1])
        return self._dense

    def of(self, log_sizes: Floats) -> Floats:
        """[n] factors of sizes [n], given as `log_sizes` has them."""
        knots = np.minimum(log_sizes.astype(np.int64), _NUM_KNOTS - 2)
        lower = self._logs[knots]
        return np.exp(lower + (log_sizes - knots) * (self._logs[knots + 1] - lower))

    def _log_factor(self, knot: int, weight: float) -> float:
        return float((1.0 - weight) * self._logs[knot] + weight * self._logs[knot + 1])


def log_sizes(length: int) -> Floats:
    """[length] where the sizes 0, 1, 2, ... are between the factors."""
    return np.minimum(np.log2(np.maximum(np.arange(length), 1)), _NUM_KNOTS - 1.0)


def _place(num_tokens: int) -> tuple[int, float]:
    place = min(math.log2(max(1, num_tokens)), _NUM_KNOTS - 1.0)
    knot = min(int(place), _NUM_KNOTS - 2)
    return knot, place - knot
