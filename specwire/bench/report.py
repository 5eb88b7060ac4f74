"""A run as tables for people and as JSON for programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from specwire.bench.metrics import ServeMetrics, acceptance_rate, position_rates
from specwire.bench.record import RequestRecord
from specwire.bench.server_counts import Counts
from specwire.console import make_table
from specwire.errors import InvalidArgumentError
from specwire.messages import SpecStats

_LATENCIES = {
    "ttft": "TTFT (ms)",
    "tpot": "TPOT (ms)",
    "token_itl": "ITL per token (ms)",
    "itl": "ITL per chunk (ms)",
    "e2el": "E2E latency (ms)",
    "wait": "held back by the client (ms)",
}
FILE_WIDTH = 120
"""Columns of tables where there is no terminal."""


def print_serve(console: Console, metrics: ServeMetrics, settings: Sequence[tuple[str, str]], *, tells_speculation: bool = True) -> None:
    """Prints the figures of a run.

    Args:
        settings: (name, value) of what was run.
        tells_speculation: the server says what it drafted.
    """
    print_table(console, "load", (), settings, justify="left")
    print_table(console, "throughput", (), throughput_rows(metrics))
    percentiles = next((distribution.percentiles for distribution in metrics.latencies.values() if distribution), ())
    rows = []
    for name, label in _LATENCIES.items():
        distribution = metrics.latencies[name]
        if distribution is None:
            continue
        values = (distribution.mean, distribution.median, distribution.std, *(value for _, value in distribution.percentiles), distribution.max)
        rows.append((label, *(f"{value:.2f}" for value in values)))
    if rows:
        print_table(console, "latency", ("", "mean", "median", "std", *(f"p{percentile:g}" for percentile, _ in percentiles), "max"), rows)
    if tells_speculation:
        print_speculation(console, metrics.speculation)
    else:
        console.print("speculation: not known, since the server does not tell\n", markup=False)
    if metrics.errors:
        print_table(console, "errors", ("kind", "requests"), [(kind, str(count)) for kind, count in metrics.errors.items()])


def throughput_rows(metrics: ServeMetrics) -> list[tuple[str, str]]:
    """(name, value), in the words of `vllm bench serve`."""
    rows = [
        ("successful requests", str(metrics.num_completed)),
        ("failed requests", str(metrics.num_failed)),
        ("benchmark duration (s)", f"{metrics.duration_s:.2f}"),
        ("total input tokens", f"{metrics.total_input_tokens} ({metrics.total_cached_tokens} from the prefix cache)"),
        ("total generated tokens", str(metrics.total_output_tokens)),
        ("request throughput (req/s)", f"{metrics.request_throughput:.2f}"),
        ("output token throughput (tok/s)", f"{metrics.output_throughput:.2f}"),
        ("peak output token throughput (tok/s)", str(metrics.max_output_tokens_per_s)),
        ("total token throughput (tok/s)", f"{metrics.total_token_throughput:.2f}"),
        ("peak concurrent requests", str(metrics.max_concurrent_requests)),
    ]
    if metrics.num_interrupted:
        rows.insert(2, ("interrupted requests", str(metrics.num_interrupted)))
    if metrics.num_retries:
        rows.insert(2, ("retries", str(metrics.num_retries)))
    if metrics.request_goodput is not None:
        rows.append(("request goodput (req/s)", f"{metrics.request_goodput:.2f}"))
    return rows


def print_speculation(console: Console, stats: SpecStats) -> None:
    """Prints the speculative section; nothing was drafted is said, too."""
    if not stats.num_drafts:
        console.print("speculation: nothing was drafted\n", markup=False)
        return
    title = "speculation (SYNTHETIC acceptance: configured, not measured)" if stats.synthetic else "speculation"
    rows = [
        ("acceptance rate (%)", f"{100 * acceptance_rate(stats):.2f}"),
        ("acceptance length", f"{stats.acceptance_length:.2f}"),
        ("drafts", str(stats.num_drafts)),
        ("draft tokens", str(stats.num_draft_tokens)),
        ("accepted tokens", str(stats.num_accepted_tokens)),
        *([("steps", str(stats.num_steps))] if stats.num_steps else []),  # not among vLLM's counters
        *((f"acceptance at position {position} (%)", f"{100 * rate:.2f}") for position, rate in enumerate(position_rates(stats))),
    ]
    if stats.num_preemptions:
        rows.append(("preemptions", str(stats.num_preemptions)))
    print_table(console, title, (), rows)


def print_differences(console: Console, clients: Counts, server: Counts | None) -> None:
    """Says where the coordinator has counted something else than it told its clients."""
    if server is None:
        return
    rows = clients.differences(server)
    if not rows:
        console.print("the coordinator's own counters say the same\n", markup=False)
        return
    title = "counted otherwise by the coordinator: it had other clients too, or requests were cut off"
    print_table(console, title, ("", "told to clients", "coordinator"), rows)


def print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, justify: Literal["left", "right"] = "right"
) -> None:
    """Prints a table whose first column is to the left; `justify` is for the others."""
    # Not the table's own title: that one is folded to the table's width.
    console.print(title, style="bold", markup=False)
    console.print(make_table(header, rows, num_left=1 if justify == "right" else None), markup=False)


def request_figures(record: RequestRecord, start_s: float) -> dict[str, Any]:
    """The raw numbers of one request for JSON; times are seconds from the run's start."""
    return {
        "index": record.index,
        "start_s": record.start_s - start_s,
        "sent_s": record.sent_s - start_s,
        "ended_s": record.ended_s - start_s,
        "chunk_times_s": [time_s - start_s for time_s in record.chunk_times_s],
        "chunk_sizes": record.chunk_sizes,
        "input_len": record.num_prompt_tokens,
        "output_len": record.num_output_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "error_text": record.error_text,
        "retries": record.num_retries,
        "num_drafts": record.spec.num_drafts if record.spec else 0,
        "num_draft_tokens": record.spec.num_draft_tokens if record.spec else 0,
        "num_accepted_tokens": record.spec.num_accepted_tokens if record.spec else 0,
        "num_steps": record.spec.num_steps if record.spec else 0,
    }


def check_output(path: Path | None) -> None:
    """Raises InvalidArgumentError if the file could not be written: better known before a long run than after it."""
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InvalidArgumentError(f"--output {path} can't be written: {error.strerror}; choose another file") from error


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes the report. Its numbers are finite or null."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
