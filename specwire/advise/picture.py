"""The advice as a picture: acceptance, cost, gain and the chosen K. Needs matplotlib (`specwire[plots]`), which is loaded only here."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specwire.advise.advice import Advice, Measured
from specwire.bench.acceptance import AcceptReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_CATEGORIES = 8
_MAX_CURVES = 5
_TITLE_WIDTH = 110
_ADVICE = "#d62728"


def draw(path: Path, measured: Measured, advice: Advice, acceptance: AcceptReport) -> None:
    """Writes a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot: it would keep the figure, and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 9.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    title = textwrap.fill(advice.headline, _TITLE_WIDTH, break_on_hyphens=False)
    figure.suptitle(f"{measured.method} on {measured.model_id}\n{title}", fontsize=12)
    _draw_acceptance(axes[0, 0], acceptance)
    _draw_steps(axes[0, 1], measured, advice)
    _draw_gains(axes[1, 0], advice)
    _draw_schedule(axes[1, 1], advice)
    figure.savefig(path)


def _draw_acceptance(axes: "Axes", acceptance: AcceptReport) -> None:
    total, *categories = acceptance.groups
    shown = sorted(categories, key=lambda group: -group.num_output_tokens)[:_MAX_CATEGORIES] if len(categories) > 1 else []
    for group in shown:
        rates = [100 * entry.unconditional for entry in group.positions]
        axes.plot(range(len(rates)), rates, marker="o", markersize=3, linewidth=1, alpha=0.7, label=f"{group.name} ({group.acceptance_length:.2f})")
    rates = [100 * entry.unconditional for entry in total.positions]
    axes.plot(range(len(rates)), rates, color="black", marker="o", linewidth=2.5, label=f"all ({total.acceptance_length:.2f})")
    axes.set(title="acceptance by position", xlabel="position in the draft, from 0", ylabel="% of drafts accepted up to here", ylim=(0, 100))
    axes.set_xticks(range(len(rates)))
    axes.legend(fontsize=8, title="category (mean acceptance length)", title_fontsize=8)
    axes.grid(alpha=0.3)


def _draw_steps(axes: "Axes", measured: Measured, advice: Advice) -> None:
    from matplotlib.ticker import LogFormatter

    assert measured.times is not None, "a picture of steps that were never measured"
    sizes = advice.sizes
    for k, color in _curves(measured.most):
        ms = [measured.times.mean_ms(size, k, measured.drafts.share[k], measured.drafts.drafts[k]) for size in sizes]
        axes.plot(sizes, ms, color=color, label=f"K = {k}")
        points = [point for point in measured.points if point.num_requested == k]
        axes.plot([point.num_sequences for point in points], [point.step_ms for point in points], "o", color=color)
    axes.set(title="time of a step (dots: measured)", xlabel="sequences", ylabel="ms")
    _log_sizes(axes, sizes)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.legend(fontsize=8)


def _draw_gains(axes: "Axes", advice: Advice) -> None:
    sizes = advice.sizes
    for k, color in _curves(advice.rates.shape[1] - 1):
        gains = [100 * float(advice.rates[size - 1, k] / advice.rates[size - 1, 0] - 1) for size in sizes]
        axes.plot(sizes, gains, color=color, linewidth=1.2, label=f"K = {k}" if k else "no drafts")
    axes.plot(sizes, [100 * advice.gain_at(size) for size in sizes], color=_ADVICE, linewidth=3, alpha=0.5, label="schedule")
    if advice.adaptive:
        best = [float(advice.rates[gain.num_sequences - 1].max() / advice.rates[gain.num_sequences - 1, 0]) for gain in advice.adaptive]
        gains = [100 * (rate * (1 + gain.over_fixed) - 1) for rate, gain in zip(best, advice.adaptive, strict=True)]
        axes.plot(sizes, gains, color="black", linestyle="--", linewidth=1.5, label="adaptive verification")
    axes.set(title="expected throughput against no drafts", xlabel="sequences", ylabel="gain, %")
    _log_sizes(axes, sizes)
    axes.legend(fontsize=8)


def _draw_schedule(axes: "Axes", advice: Advice) -> None:
    every = np.arange(1, len(advice.rates) + 1)
    axes.step(every, advice.rates.argmax(axis=1), where="mid", color="gray", linewidth=1, label="best K of each size")
    axes.step(every, [advice.k_at(int(size)) for size in every], where="mid", color=_ADVICE, linewidth=3, label="schedule")
    axes.set(title="K by batch size", xlabel="sequences", ylabel="K", ylim=(-0.3, advice.rates.shape[1] - 0.5))
    axes.set_yticks(range(advice.rates.shape[1]))
    _log_sizes(axes, advice.sizes)
    axes.legend(fontsize=8)


def _curves(most: int) -> list[tuple[int, Any]]:
    """(K, colour) of 0, 1, the largest K, and some between them."""
    from matplotlib import colormaps

    chosen = sorted({0, *(round(float(k)) for k in np.linspace(1, most, min(most, _MAX_CURVES)))})
    return [(k, "dimgray" if not k else colormaps["viridis"](0.9 * k / max(1, most))) for k in chosen]


def _log_sizes(axes: "Axes", sizes: list[int]) -> None:
    powers = [size for size in sizes if size & (size - 1) == 0]
    axes.set_xscale("log", base=2)
    axes.set_xticks(powers, labels=[str(size) for size in powers])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
