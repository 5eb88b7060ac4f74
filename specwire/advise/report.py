"""The advice as tables and as JSON."""

import dataclasses
from typing import Any

from rich.console import Console

from specwire.advise.advice import Advice, Measured
from specwire.bench.report import print_table


def print_advice(console: Console, measured: Measured, advice: Advice) -> None:
    """Prints everything but the acceptance, which is printed as `specwire bench accept` does."""
    header = ("drafts asked for (K)", *(str(k) for k in range(len(measured.drafts.tokens))))
    print_table(console, "a sequence's step", header, [
        ("tokens", *(f"{value:.2f}" for value in measured.drafts.tokens)),
        ("steps with drafts, %", *(f"{100 * value:.1f}" for value in measured.drafts.share)),
        ("drafts of those", *(f"{value:.2f}" for value in measured.drafts.drafts)),
    ])  # fmt: skip
    if measured.times is not None:
        known = not measured.times.unknown
        rows = [
            (
                str(point.num_sequences),
                str(point.num_requested),
                f"{point.share * point.num_drafts:.2f}",
                f"{point.step_ms:.2f}",
                f"{point.spread:.1%}",
                f"{measured.times.table_ms(point):.2f}" if known else "not known",
            )
            for point in sorted(measured.points, key=lambda point: (point.num_sequences, point.num_requested))
        ]
        print_table(console, "steps as they were measured", ("sequences", "K", "drafts a row", "step (ms)", "spread", "by the tables (ms)"), rows)
        header = ("sequences", "plain (tokens/s)", "K", "tokens/s", "gain", "best K", "its gain", "adaptive over best K")
        print_table(console, "expected throughput of a lane", header, [_size_row(advice, size) for size in advice.sizes])
    console.print(f"advice: {advice.headline}", style="bold", markup=False)
    for note in advice.notes:
        console.print(f"  {note}", markup=False)


def _size_row(advice: Advice, size: int) -> list[str]:
    rates, k = advice.rates[size - 1], advice.k_at(size)
    best = int(rates.argmax())
    adaptive = {gain.num_sequences: gain for gain in advice.adaptive}[size]
    figures = [
        f"{1e3 * rates[0]:.1f}",
        str(k),
        f"{1e3 * rates[k]:.1f}",
        f"{advice.gain_at(size):+.1%}",
        str(best),
        f"{rates[best] / rates[0] - 1:+.1%}",
    ]
    return [str(size), *figures, f"{adaptive.over_fixed:+.1%}"]


def to_json(measured: Measured, advice: Advice) -> dict[str, Any]:
    """Plain values; rates in tokens a second of a lane."""
    sizes = []
    for size in advice.sizes:
        rates = advice.rates[size - 1]
        sizes.append(
            {
                "num_sequences": size,
                "num_speculative_tokens": advice.k_at(size),
                "gain": advice.gain_at(size),
                "tokens_per_s_by_k": [1e3 * float(rate) for rate in rates],
            }
        )
    return {
        "model_id": measured.model_id,
        "method": measured.method,
        "headline": advice.headline,
        "notes": list(advice.notes),
        "leave_off": advice.is_off,
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in advice.schedule],
        "enable_adaptive_verification": advice.use_adaptive,
        "min_gain": advice.min_gain,
        "max_num_seqs": len(advice.rates),
        "tokens_per_step_by_k": list(measured.drafts.tokens),
        "drafted_share_by_k": list(measured.drafts.share),
        "drafts_per_drafted_step_by_k": list(measured.drafts.drafts),
        "measured_steps": [_point(measured, index) for index in range(len(measured.points))],
        "batch_sizes": sizes,
        "adaptive": [dataclasses.asdict(gain) for gain in advice.adaptive],
    }


def _point(measured: Measured, index: int) -> dict[str, Any]:
    point = measured.points[index]
    known = measured.times is not None and not measured.times.unknown
    return {**dataclasses.asdict(point), "table_ms": measured.times.table_ms(point) if known and measured.times is not None else None}
