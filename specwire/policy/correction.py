"""How far a measured curve is off while it serves: one slow factor, and how well predictions hit (design section 4)."""

import math
import statistics
from collections import deque

_RATE = 0.05
"""Weight of one step: after 45 steps a tenth of the difference is left."""
MAX_SURPRISE = math.log(2.0)
"""A step that took longer than twice the prediction counts as twice: one hiccup must not bend the curve."""
_MAX_FACTOR = 8.0
_NUM_ERRORS = 256


class PredictionErrors:
    """Relative errors |predicted - measured| / measured of the last 256 predictions."""

    __slots__ = ("_errors",)

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    def observe(self, predicted_ms: float, measured_ms: float) -> None:
        """measured_ms is above 0."""
        self._errors.append(abs(predicted_ms - measured_ms) / measured_ms)

    def __len__(self) -> int:
        return len(self._errors)

    @property
    def median(self) -> float:
        """0 without any."""
        return statistics.median(self._errors.copy()) if self._errors else 0.0


class Correction:
    """factor = exp(L), L <- L + rate x clip(log(measured / table) - L), so that it follows the running mean of the logarithm of the ratio.

    Attributes:
        factor: what the table's milliseconds are multiplied by; from 1/8 to 8, 1 before the first measurement.
        errors: of predictions with the factor of their time.
    """

    __slots__ = ("_log_factor", "errors", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self.errors = PredictionErrors()
        self._log_factor = 0.0

    def observe(self, table_ms: float, measured_ms: float) -> None:
        """One step: what the table says, without the factor, and what was measured. Nothing where either is not a positive finite number."""
        if not (0.0 < table_ms < math.inf and 0.0 < measured_ms < math.inf):
            return
        self.errors.observe(self.factor * table_ms, measured_ms)
        surprise = math.log(measured_ms / table_ms) - self._log_factor
        self._log_factor += _RATE * min(max(surprise, -MAX_SURPRISE), MAX_SURPRISE)
        self._log_factor = min(max(self._log_factor, -math.log(_MAX_FACTOR)), math.log(_MAX_FACTOR))
        self.factor = math.exp(self._log_factor)
