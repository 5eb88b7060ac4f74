"""Throughput against the speed that a user sees. Needs matplotlib (`specwire[plots]`), which is loaded only here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specwire.bench.sweep.run import Cell

_STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "dimgray"},
    "dynamic": {"color": "#1f77b4", "linewidth": 2.5},
    "adaptive": {"color": "#d62728", "linewidth": 2.5},
}
_FIXED = ("#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
_MARKERS = "osDv^<>Pp*"


def draw(path: Path, cells: Sequence[Cell], model_id: str) -> None:
    """Writes a PNG: a curve for each policy, a marker for each concurrency.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot: it would keep the figure, and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.0, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    markers = {concurrency: _MARKERS[index % len(_MARKERS)] for index, concurrency in enumerate(dict.fromkeys(cell.concurrency for cell in cells))}
    curves: list[Line2D] = []
    for policy in dict.fromkeys(cell.policy for cell in cells):
        style = _STYLES.get(policy, {"linestyle": "--", "alpha": 0.8, "color": _FIXED[len(curves) % len(_FIXED)]})
        points = [cell for cell in cells if cell.policy == policy]
        speeds, throughputs = [cell.user_tokens_per_s for cell in points], [cell.metrics.output_throughput for cell in points]
        curves += axes.plot(speeds, throughputs, label=policy, **style)
        for cell, speed, throughput in zip(points, speeds, throughputs, strict=True):
            axes.plot(speed, throughput, markers[cell.concurrency], color=curves[-1].get_color(), markersize=7)
    axes.set(title=model_id, xlabel="tokens/s of a user (1 / median TPOT)", ylabel="tokens/s of all", ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    # Beside the axes: any corner may have points.
    figure.legend(handles=curves, title="K", loc="outside right upper")
    shapes = [Line2D([], [], color="black", linestyle="none", marker=marker, label=str(size)) for size, marker in markers.items()]
    figure.legend(handles=shapes, title="at once", loc="outside right lower")
    figure.savefig(path)
