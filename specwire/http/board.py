"""Numbers that several processes count side by side: a file in memory with a column of integers for each of them, which keeps what a process
that was replaced has counted."""

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specwire.metrics import Histogram, Kind, Metric, Sample
from specwire.metrics.histogram import NS_PER_S

_BYTES = 8


class Layout:
    """Where each number has its cell.

    Args:
        families: metrics with all label values that they can have.
        bounds: of the histograms, by name.
    """

    def __init__(self, families: Sequence[tuple[Metric, Sequence[tuple[str, ...]]]], bounds: dict[str, Sequence[int]]) -> None:
        self.series: dict[tuple[str, tuple[str, ...]], tuple[Metric, int, int]] = {}  # metric, first cell, number of cells
        self.bounds = bounds
        self.num_cells = 0
        for metric, all_values in families:
            # A histogram has a count for each bound, one for what is above them, and the sum.
            num_cells = len(bounds[metric.name]) + 2 if metric.kind is Kind.HISTOGRAM else 1
            for values in all_values:
                self.series[metric.name, values] = metric, self.num_cells, num_cells
                self.num_cells += num_cells


class Board:
    """A process's own numbers, and the sums over all processes.

    Args:
        layout: the same in all processes.
        path: of a file that they share, made by `make`; None = there is only this process.
        column: which of the columns is this process's own.
        num_columns: processes.
    """

    def __init__(self, layout: Layout, path: Path | None = None, column: int = 0, num_columns: int = 1) -> None:
        self._layout = layout
        self._num_columns = num_columns
        num_bytes = layout.num_cells * num_columns * _BYTES
        if path is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), num_bytes)
        # Python's own integers in a shared page: a cell is written and read at once, and by one process only.
        self._cells = memoryview(memory).cast("q")
        self._first = column * layout.num_cells
        for metric, cell, _ in layout.series.values():
            if metric.kind is Kind.GAUGE:
                self._cells[self._first + cell] = 0  # the process that had the column before runs nothing any more

    @staticmethod
    def make(layout: Layout, path: Path, num_columns: int) -> None:
        """Makes the shared file."""
        path.write_bytes(bytes(layout.num_cells * num_columns * _BYTES))

    def add(self, metric: Metric, values: tuple[str, ...] = (), amount: int = 1) -> None:
        """Counts; also down, for a gauge."""
        self._cells[self._first + self._layout.series[metric.name, values][1]] += amount

    def observe(self, metric: Metric, value: int, times: int = 1) -> None:
        """Puts a value (nanoseconds, for histograms in seconds) into a histogram without labels."""
        _, cell, num_cells = self._layout.series[metric.name, ()]
        self._cells[self._first + cell + bisect_left(self._layout.bounds[metric.name], value)] += times
        self._cells[self._first + cell + num_cells - 1] += value * times

    def own(self, metric: Metric, values: tuple[str, ...] = ()) -> int:
        """What this process has counted."""
        return self._cells[self._first + self._layout.series[metric.name, values][1]]

    def samples(self) -> Iterator[Sample]:
        """The sums over all processes."""
        for (_, values), (metric, cell, num_cells) in self._layout.series.items():
            sums = [sum(self._column(cell + index)) for index in range(num_cells)]
            yield Sample(metric, values, self._histogram(metric, sums) if metric.kind is Kind.HISTOGRAM else sums[0])

    def _column(self, cell: int) -> Iterable[int]:
        return (self._cells[column * self._layout.num_cells + cell] for column in range(self._num_columns))

    def _histogram(self, metric: Metric, sums: Sequence[int]) -> Histogram:
        unit = NS_PER_S if metric.name.endswith("_seconds") else 1
        return Histogram.of(self._layout.bounds[metric.name], unit, sums[:-1], sums[-1])
