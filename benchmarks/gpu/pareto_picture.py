"""Draws what `pareto` has measured: `python -m benchmarks.gpu.pareto_picture [FOLDER]` reads its files there and writes pareto.png and rollout.png
beside them. Needs matplotlib (`specwire[plots]`)."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.slices import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SLICES = ("block-uniform", "block-mixed", "model-uniform", "model-mixed")
_TITLES = {"block": "block drafter", "model": "draft model", "uniform": "all accepted at 0.8", "mixed": "half at 0.9, half at 0.3"}
_STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "dimgray", "linewidth": 1.5},
    "dynamic": {"color": "#1f77b4", "linewidth": 2},
    "adaptive": {"color": "#d62728", "linewidth": 2.5},
}


def draw_pareto(found: dict[str, Any], path: Path) -> None:
    """Throughput against the speed that a user sees; a panel for each slice that is there.

    Args:
        found: contents of the files, by slice.
    """
    from matplotlib.ticker import LogLocator

    figure, panels = _figure(len(found))
    for axes, (name, report) in zip(panels, found.items(), strict=True):
        sigma = max(row["sigma"] for row in report["rows"])
        rows = [row for row in report["rows"] if row["sigma"] == sigma]
        for policy in dict.fromkeys(row["policy"] for row in rows):
            curve = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["c"])
            style = _STYLES.get(policy, {"linewidth": 1, "alpha": 0.7, "linestyle": "--"})
            axes.plot([row["user_tok_s"] for row in curve], [row["tok_s"] for row in curve], marker="o", markersize=4, label=policy, **style)
            if policy == "adaptive":
                for row in curve:
                    axes.annotate(str(row["c"]), (row["user_tok_s"], row["tok_s"]), textcoords="offset points", xytext=(5, 5), fontsize=8)
        drafter, _, mix = name.partition("-")
        axes.set(title=f"{_TITLES[drafter]}, {_TITLES[mix]}", xlabel="tokens/s of a user", ylabel="tokens/s of all", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(LogLocator(subs=(2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
            axis.set_tick_params(which="minor", labelsize=7)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.suptitle("Throughput against a user's speed; numbers: sequences at once")
    figure.savefig(path)


def draw_rollout(report: dict[str, Any], path: Path) -> None:
    """Wall times by policy, and K over time of those that were watched."""
    figure, (times, drafts) = _figure(2)
    rows = report["rows"]
    times.bar(
        [row["policy"] for row in rows],
        [row["seconds"] for row in rows],
        color=[_STYLES.get(row["policy"], {}).get("color", "silver") for row in rows],
    )
    times.set(title=f"{rows[0]['num_sequences']} sequences until the last token", ylabel="s")
    running = drafts.twinx()
    for row in rows:
        points = row.get("k_over_time", [])
        style = _STYLES.get(row["policy"], {})
        seconds = [point["seconds"] for point in points]
        if points:
            drafts.plot(seconds, [point["k"] for point in points], label=f"K, {row['policy']}", **style)
            running.plot(seconds, [point["num_running"] for point in points], color=style.get("color"), linestyle=":", linewidth=1)
    drafts.set(title="drafts verified a step and sequence (dotted: sequences that run)", xlabel="s", ylabel="K")
    running.set(ylabel="sequences")
    drafts.legend(fontsize=8)
    figure.savefig(path)


def _figure(num_panels: int) -> "tuple[Any, Sequence[Axes]]":
    # Not pyplot: it would keep the figure, and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = -(-num_panels // 2)
    figure = Figure(figsize=(12.8, 1.0 + 4.6 * num_rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, 2, squeeze=False).flatten().tolist()
    for unused in axes[num_panels:]:
        unused.remove()
    return figure, axes[:num_panels]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="where the files of `pareto` are; results/gpu")
    folder: Path = parser.parse_args(arguments).folder
    paths = {name: folder / f"pareto-{name}.json" for name in (*_SLICES, "rollout")}
    reports = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    found = {name: report for name, report in reports.items() if report["is_complete"]}
    rollout = found.pop("rollout", None)
    if not found and rollout is None:
        raise SystemExit(f"{folder} has no complete results of benchmarks.gpu.pareto; run it, or name the folder that has some")
    if found:
        draw_pareto(found, folder / "pareto.png")
        print(folder / "pareto.png")
    if rollout is not None:
        draw_rollout(rollout, folder / "rollout.png")
        print(folder / "rollout.png")


if __name__ == "__main__":
    main()
