"""What was measured online as a picture. Needs matplotlib (`specwire[plots]`), which is loaded only here."""

from collections.abc import Sequence
from pathlib import Path

from specwire.advise.online import OnlineRate
from specwire.advise.options import Thresholds

_PLAIN, _DRAFTED = "dimgray", "#1f77b4"
_WIDTH = 0.35


def draw_online(path: Path, rates: Sequence[OnlineRate], thresholds: Thresholds, title: str) -> None:
    """Writes a PNG: time per token and tokens a second at both rates, dots for single runs.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot: it would keep the figure, and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    times, served = figure.subplots(1, 2)
    for axes, name, unit in ((times, "tpot_ms", "time per token, ms"), (served, "tokens_per_s", "tokens a second")):
        for side, (label, color) in enumerate((("without drafts", _PLAIN), (f"K = {rates[0].num_speculative_tokens}", _DRAFTED))):
            for place, rate in enumerate(rates):
                values = sorted(getattr(pair[side], name) for pair in rate.pairs)
                x = place + (side - 0.5) * _WIDTH
                axes.bar(x, values[len(values) // 2], _WIDTH * 0.92, color=color, alpha=0.75, label=label if not place else None)
                axes.plot([x] * len(values), values, "o", color="black", markersize=3)
        gains = [rate.tpot_gain if axes is times else rate.throughput_gain for rate in rates]
        labels = [f"{rate.name}: {rate.requests_per_s:.2f} requests/s\n{gain:+.1%}" for rate, gain in zip(rates, gains, strict=True)]
        axes.set_xticks(range(len(rates)), labels=labels)
        axes.set(title=unit, ylabel=unit)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=8)
    times.set_xlabel(f"saved; {thresholds.min_tpot_gain:.0%} at the low rate is a yes")
    served.set_xlabel(f"more; a loss up to {thresholds.max_loss:.0%} is none")
    figure.savefig(path)
