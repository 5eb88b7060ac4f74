"""The findings as tables and as JSON."""

import dataclasses
from typing import Any

from rich.console import Console

from specwire.advise.advice import Advice, Measured
from specwire.advise.run import Findings
from specwire.advise.sections import sections
from specwire.bench.accept_report import print_accept
from specwire.bench.accept_report import to_json as acceptance_to_json
from specwire.bench.report import print_table


def print_findings(console: Console, findings: Findings) -> None:
    """Prints everything."""
    print_accept(console, findings.acceptance)
    if findings.measured is not None and findings.advice is not None:
        print_steps(console, findings.measured, findings.advice)
    for section in sections(findings):
        console.print(section.title, style="bold", markup=False)
        for line in section.lines:
            console.print(f"  {line}", markup=False)
    console.print(f"\nadvice: {findings.decision.headline}", style="bold", markup=False)


def print_steps(console: Console, measured: Measured, advice: Advice) -> None:
    """Prints what steps take, and what follows from it."""
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


def to_json(findings: Findings) -> dict[str, Any]:
    """Plain values; rates in tokens a second of a lane."""
    decision, advice = findings.decision, findings.advice
    online = [rate for rate in (findings.low, findings.high) if rate is not None]
    return {
        "model_id": findings.model_id,
        "method": findings.chosen.method,
        "headline": decision.headline,
        "verdict": decision.verdict.value,
        "leave_off": decision.verdict.is_off,
        "reasons": list(decision.reasons),
        "doubts": list(decision.doubts),
        "notes": list(findings.reservations if advice is None else advice.notes),
        "speculative_config": {**findings.drafter_keys, **findings.keys},
        "workload": {
            **dataclasses.asdict(findings.workload),
            "low_bound": findings.workload.bound(findings.workload.low),
            "high_bound": findings.workload.bound(findings.workload.high),
        },
        "candidates": [dataclasses.asdict(candidate) for candidate in findings.candidates],
        "chosen": dataclasses.asdict(findings.chosen),
        "online": [
            {
                **dataclasses.asdict(rate),
                "tpot_gain": rate.tpot_gain,
                "throughput_gain": rate.throughput_gain,
                "noise": rate.noise,
                "throughput_noise": rate.throughput_noise,
            }
            for rate in online
        ],
        "canary": None if findings.plan is None else dataclasses.asdict(findings.plan),
        "tokens_per_step_by_k": list(findings.drafts.tokens),
        "drafted_share_by_k": list(findings.drafts.share),
        "drafts_per_drafted_step_by_k": list(findings.drafts.drafts),
        **_steps(findings),
        "acceptance": acceptance_to_json(findings.acceptance),
    }


def _steps(findings: Findings) -> dict[str, Any]:
    """What was measured of steps; plain decoding for all batch sizes where nothing was."""
    measured, advice = findings.measured, findings.advice
    if measured is None or advice is None:
        return {"num_speculative_tokens_per_batch_size": [[1, findings.max_num_seqs, 0]], "max_num_seqs": findings.max_num_seqs, "measured_steps": []}
    return {
        "schedule_headline": advice.headline,
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in advice.schedule],
        "enable_adaptive_verification": advice.use_adaptive,
        "min_gain": advice.min_gain,
        "max_num_seqs": len(advice.rates),
        "measured_steps": [_point(measured, index) for index in range(len(measured.points))],
        "batch_sizes": [
            {
                "num_sequences": size,
                "num_speculative_tokens": advice.k_at(size),
                "gain": advice.gain_at(size),
                "tokens_per_s_by_k": [1e3 * float(rate) for rate in advice.rates[size - 1]],
            }
            for size in advice.sizes
        ],
        "adaptive": [dataclasses.asdict(gain) for gain in advice.adaptive],
    }


def _point(measured: Measured, index: int) -> dict[str, Any]:
    point = measured.points[index]
    known = measured.times is not None and not measured.times.unknown
    return {**dataclasses.asdict(point), "table_ms": measured.times.table_ms(point) if known and measured.times is not None else None}
