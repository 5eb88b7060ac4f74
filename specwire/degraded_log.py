"""Warnings that do not flood the log."""

import logging
import time
from collections import Counter

_MAX_CAUSES = 256


class DegradedLog:
    """One warning per cause and period; the next one says how many were left out. Causes that are long past are forgotten, with their
    numbers, once there are many: some name peers, which come and go."""

    def __init__(self, logger: logging.Logger, period_s: float = 5.0) -> None:
        self._logger = logger
        self._period_s = period_s
        self._last: dict[str, float] = {}
        self._num_left_out: Counter[str] = Counter()

    def warning(self, cause: str, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last.get(cause, -self._period_s) < self._period_s:
            self._num_left_out[cause] += 1
            return
        if len(self._last) >= _MAX_CAUSES:
            self._last = {other: last for other, last in self._last.items() if now - last < self._period_s}
            self._num_left_out = Counter({other: count for other, count in self._num_left_out.items() if other in self._last or other == cause})
        self._last[cause] = now
        num_left_out = self._num_left_out.pop(cause, 0)
        self._logger.warning(message + (f" (and {num_left_out} more like it)" if num_left_out else ""), *values)
