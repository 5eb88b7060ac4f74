"""Histograms of whole numbers: fixed bounds, integer counts and an integer sum, so that nothing is ever rounded."""

from bisect import bisect_left
from collections.abc import Sequence

_MS = 1_000_000

STEP_BOUNDS = tuple(
    round(ms * _MS) for ms in (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1_000, 2_000, 5_000, 10_000)
)
"""Nanoseconds: a step, its parts, and what lies between two tokens."""
LATENCY_BOUNDS = tuple(
    round(ms * _MS) for ms in (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000)
)
"""Nanoseconds: what a request waits for."""
NUM_TOKENS_BOUNDS = tuple(1 << exponent for exponent in range(18))
"""Tokens: 1, 2, 4, ... 131072."""
NS_PER_S = 1_000_000_000


class Histogram:
    """Counts of whole numbers by fixed upper bounds (a value that equals a bound is below it). One thread observes; any may read.

    Args:
        bounds: ascending; values above the last one are counted too.
        unit: what one exported unit is: NS_PER_S where nanoseconds are observed and seconds shown.
    """

    __slots__ = ("_bounds", "_counts", "_sum", "_unit")

    def __init__(self, bounds: Sequence[int], unit: int = NS_PER_S) -> None:
        assert list(bounds) == sorted(set(bounds)), f"bounds {bounds} do not ascend"
        self._bounds = tuple(bounds)
        self._unit = unit
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0

    @classmethod
    def of(cls, bounds: Sequence[int], unit: int, counts: Sequence[int], total: int) -> "Histogram":
        """What was counted elsewhere: observations between the bounds, those above the last one included, and their sum."""
        histogram = cls(bounds, unit)
        assert len(counts) == len(histogram._counts), f"{len(counts)} counts do not go with {len(bounds)} bounds"
        histogram._counts[:] = counts
        histogram._sum = total
        return histogram

    def observe(self, value: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_parts(self, total: int, num_parts: int, times: int = 1) -> None:
        """As many observations as there are parts, all equal, `times` times: what a step's tokens add to a histogram by token."""
        self._counts[bisect_left(self._bounds, -(-total // num_parts))] += num_parts * times
        self._sum += total * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Of all observations, in exported units."""
        return self._sum / self._unit

    def buckets(self) -> list[tuple[float, int]]:
        """(upper bound in exported units, observations up to it), ascending, infinity last: consistent in itself whenever it is read."""
        counts = self._counts[:]
        total, out = 0, []
        for bound, count in zip((*self._bounds, None), counts, strict=True):
            total += count
            out.append((float("inf") if bound is None else bound / self._unit, total))
        return out
