"""Acceptance as tables and as JSON."""

import dataclasses
from typing import Any

from rich.console import Console

from specwire.bench.acceptance import Acceptance, AcceptReport
from specwire.bench.calibration import Calibration
from specwire.bench.report import print_table

_MAX_DIFFERENCES = 10


def print_accept(console: Console, report: AcceptReport) -> None:
    """Prints everything."""
    total = report.groups[0]
    if total.stats.synthetic:
        console.print("SYNTHETIC acceptance: these rates are configured, not measured\n", markup=False)
    columns = ("category", "weight", "prompts", "tokens", "steps", "drafts", "draft tokens", "accepted", "rate %", "length", "tokens/step")
    print_table(console, f"acceptance{f' of {report.model_id}' if report.model_id else ''} (rate, length and tokens/step by weight)", columns, [
        _count_row(group) for group in report.groups
    ])  # fmt: skip
    if total.stats.num_drafts:
        header = ("category", *(f"{position}" for position in range(len(total.positions))))
        title = "acceptance at position (from 0), % of drafts whose tokens up to there were all accepted"
        rows = [[group.name, *(f"{100 * entry.unconditional:.1f}" for entry in group.positions)] for group in report.groups]
        print_table(console, title, header, [row + [""] * (len(header) - len(row)) for row in rows])
    else:
        console.print("nothing was drafted\n", markup=False)
    if total.calibration is not None and total.stats.num_drafts:
        _print_calibration(console, total, total.calibration)
    if report.errors:
        print_table(console, "errors", ("kind", "requests"), [(kind, str(count)) for kind, count in report.errors.items()])
    if report.num_compared is not None:
        same = report.num_compared - len(report.differences)
        console.print(f"{same} of {report.num_compared} answers have the same tokens without drafts", markup=False)
        for entry in report.differences[:_MAX_DIFFERENCES]:
            console.print(f"  {entry.name} differs from token {entry.position} on", markup=False)


def to_json(report: AcceptReport) -> dict[str, Any]:
    """Plain values."""
    return {
        "model_id": report.model_id,
        "failed": report.num_failed,
        "errors": report.errors,
        "interrupted": report.interrupted,
        "compared": report.num_compared,
        "differences": [dataclasses.asdict(entry) for entry in report.differences],
        "groups": [_group(group) for group in report.groups],
    }


def _count_row(group: Acceptance) -> list[str]:
    stats = group.stats
    counts = (group.num_prompts, group.num_output_tokens, stats.num_steps, stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
    ratios = f"{100 * group.acceptance_rate:.2f}", f"{group.acceptance_length:.3f}", f"{group.tokens_per_step:.3f}"
    return [group.name, f"{group.weight:g}", *map(str, counts), *ratios]


def _print_calibration(console: Console, total: Acceptance, calibration: Calibration) -> None:
    title = f"calibration of the drafter's raw scores: expected error {calibration.error:.3f} over {calibration.num_observed} observed draft tokens"
    if calibration.num_unscored:
        title += f" ({calibration.num_unscored} more had no score)"
    rows = [
        (f"{entry.low:.1f} to {entry.high:.1f}", str(entry.num_observed), f"{entry.mean_score:.3f}", f"{entry.rate:.3f}")
        for entry in calibration.bins
    ]
    if rows:
        print_table(console, title, ("score", "observed", "mean score", "accepted"), rows)
    rows = [
        (str(position), str(entry.num_observed), f"{entry.conditional or 0.0:.3f}", f"{entry.calibration.error:.3f}")
        for position, entry in enumerate(total.positions)
        if entry.calibration is not None and entry.num_observed
    ]
    if rows:
        print_table(
            console, "by position (from 0), given that all before it were accepted", ("position", "observed", "accepted", "calibration error"), rows
        )


def _group(group: Acceptance) -> dict[str, Any]:
    stats = group.stats
    return {
        "name": group.name,
        "weight": group.weight,
        "prompts": group.num_prompts,
        "output_tokens": group.num_output_tokens,
        "steps": stats.num_steps,
        "drafts": stats.num_drafts,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "accepted_per_position": list(stats.accepted_per_position),
        "synthetic": stats.synthetic,
        "acceptance_rate": group.acceptance_rate,
        "acceptance_length": group.acceptance_length,
        "tokens_per_step": group.tokens_per_step,
        "positions": [
            {
                "unconditional_rate": entry.unconditional,
                "conditional_rate": entry.conditional,
                "observed": entry.num_observed,
                "calibration": _calibration(entry.calibration),
            }
            for entry in group.positions
        ],
        "calibration": _calibration(group.calibration),
    }


def _calibration(calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    return {
        "observed": calibration.num_observed,
        "unscored": calibration.num_unscored,
        "expected_error": calibration.error,
        "bins": [{**dataclasses.asdict(entry), "rate": entry.rate} for entry in calibration.bins],
    }
