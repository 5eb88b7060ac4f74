"""A sweep as a table, JSON and a picture."""

import dataclasses
import logging
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from specwire.bench.folder import whole_file
from specwire.bench.metrics import acceptance_rate
from specwire.bench.report import print_table, write_json
from specwire.bench.serve_report import settings
from specwire.bench.sweep.options import SweepOptions
from specwire.bench.sweep.policies import NONE
from specwire.bench.sweep.run import Cell, SweepResult
from specwire.extras import not_installed

logger = logging.getLogger(__name__)

FILES = JSON_NAME, PICTURE_NAME = "sweep.json", "sweep.png"
_HEADER = ("at once", "policy", "tokens/s", "of a user", "x none", "TTFT p50 (ms)", "TPOT p50 (ms)", "accepted (%)", "length", "differ")


def median_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Of each policy and concurrency the run whose throughput is the median one (of an even number, the lower)."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.concurrency, cell.policy), []).append(cell)
    chosen = []
    for _, group in sorted(groups.items(), key=lambda item: item[0][0]):
        middle = statistics.median_low(cell.metrics.output_throughput for cell in group)
        chosen.append(next(cell for cell in group if cell.metrics.output_throughput == middle))
    return chosen


def print_sweep(console: Console, result: SweepResult) -> None:
    """Prints the table, by concurrency, and the dynamic policy's schedule."""
    cells = median_cells(result.cells)
    plain = {cell.concurrency: cell.metrics.output_throughput for cell in cells if cell.policy == NONE.name}
    if cells:
        print_table(console, f"sweep: {result.model_id}", _HEADER, [_row(cell, plain.get(cell.concurrency)) for cell in cells])
    if result.schedule is not None:
        console.print(f"schedule of dynamic: {[list(entry) for entry in result.schedule]}\n", markup=False)


def write_sweep(options: SweepOptions, environment: dict[str, Any], result: SweepResult) -> None:
    """Writes sweep.json and, where matplotlib is installed, sweep.png."""
    report = {
        "benchmark": "sweep",
        **environment,
        "model_id": result.model_id,
        "settings": settings(dataclasses.replace(options)),
        "schedule": result.schedule,
        "interrupted": result.interrupted,
        "rows": [cell.figures() for cell in result.cells],
    }
    with whole_file(options.output / JSON_NAME) as file:
        write_json(file, report)
    if not result.cells:
        return
    try:
        from specwire.bench.sweep.picture import draw

        with whole_file(options.output / PICTURE_NAME) as file:
            draw(file, median_cells(result.cells), result.model_id)
    except ModuleNotFoundError as error:
        logger.warning("there is no picture, since %s", not_installed([str(error.name)], "plots"))


def _row(cell: Cell, plain: float | None) -> tuple[str, ...]:
    metrics, speculation = cell.metrics, cell.metrics.speculation
    ratio = "" if not plain else f"{metrics.output_throughput / plain:.2f}"
    differ = "" if cell.num_different is None else f"{cell.num_different} of {metrics.num_completed}"
    return (
        str(cell.concurrency),
        cell.policy,
        f"{metrics.output_throughput:.1f}",
        f"{cell.user_tokens_per_s:.1f}",
        ratio,
        "" if metrics.ttft_ms is None else f"{metrics.ttft_ms.median:.1f}",
        "" if metrics.tpot_ms is None else f"{metrics.tpot_ms.median:.2f}",
        f"{100 * acceptance_rate(speculation):.1f}" if speculation.num_drafts else "",
        f"{speculation.acceptance_length:.2f}" if speculation.num_drafts else "",
        differ,
    )
