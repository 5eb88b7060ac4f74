"""The tables of docs/performance.md, section Placement, from the files of `two_gpus`: `python -m benchmarks.gpu.two_gpus_tables [FOLDER]`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.slices import RESULTS
from benchmarks.gpu.two_gpus_placement import EAGLE3, GRPC, HALVES, MODEL, NONE, OWN, PLAIN, SHARED, SHARED_HALVES, compare

_NAMES = {MODEL: "llama-1b, K = 5", EAGLE3: "EAGLE-3, K = 3"}
_MISSING = ""


def placement_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Tokens a second and gains, then where a step goes, then features."""
    rows = found["rows"]
    all_gains = compare(rows)["gains"]
    cells = {(row["drafter"], row["placement"], row["c"]): row for row in rows}
    counts = sorted({row["c"] for row in rows})
    names = (OWN, HALVES, SHARED, SHARED_HALVES)
    header = ["drafter", "sequences", "own GPU, tok/s", "own GPU, half batches", "shared GPU", "shared GPU, half batches", "no drafts, one GPU",
              "own / shared", "two GPUs / best of one", "the same by GPU", "verifiers it must serve", "verifiers it can serve"]  # fmt: skip
    body = []
    for drafter, label in _NAMES.items():
        for count in counts:
            tok_s = [_figure(cells.get((drafter, name, count)), "tok_s", "{:,.0f}") for name in names]
            plain = _figure(cells.get((NONE, PLAIN, count)), "tok_s", "{:,.0f}")
            gains = all_gains.get(drafter, {}).get(str(count), {})
            needed = "never pays" if gains.get("break_even_verifiers", 0.0) is None else _figure(gains, "break_even_verifiers", "{:.1f}")
            parts = [_figure(gains, name, "{:.2f}") for name in ("own_x_shared", "own_x_best", "own_x_best_per_gpu")]
            body.append([label, str(count), *tok_s, plain, *parts, needed, _figure(gains, "drafter_serves", "{:.1f}")])
    yield table(header, body)
    halved = [
        [_NAMES[drafter], count, *(_figure(gains, name, "{:.1f}") for name in ("halves_ms", "halves_predicted_ms"))]
        for drafter, by_count in all_gains.items() for count, gains in by_count.items() if "halves_ms" in gains
    ]  # fmt: skip
    yield table(["drafter", "sequences", "step of half batches, ms", "by the parts of a step of half as many"], halved)
    header = ["drafter", "placed", "sequences", "draft, ms", "hops to the drafter", "hops to the verifier", "verify", "step",
              "the verifier's GPU idle", "the drafter's GPU idle"]  # fmt: skip
    yield table(header, [_step(row) for row in rows if row["placement"] != GRPC])
    ways = {"memory": "memory (CUDA IPC)", "grpc": "gRPC"}
    body = [
        [ways[way], row["placement"], str(row["c"]), f"{row[f'{way}_bytes_per_step'] / 1e3:,.0f}", f"{row[f'{way}_ms_per_step']:.2f}",
         f"{row[f'{way}_share_of_step']:.1%}"]
        for row in rows for way in ways if f"{way}_bytes_per_step" in row
    ]  # fmt: skip
    yield table(["way", "placed", "sequences", "kB a step", "ms a step", "share of the step"], body)


def lanes_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """One lane and two; K by load; a lane that is lost."""
    header = ["sequences a lane", "K", "one lane, tok/s", "two lanes with twice the load", "two / one", "aim"]
    rows = [
        [str(row["c"]), str(row["k"]), f"{row['one_tok_s']:,.0f}", f"{row['two_tok_s']:,.0f}", f"{row['x_one']:.2f}",
         f"{row['aim']} {'met' if row['is_met'] else '**missed**'}"]
        for row in found["rows"]
    ]  # fmt: skip
    yield table(header, rows)
    yield table(["lane", "K"], [[lane, str(k)] for lane, k in found.get("k_of_different_loads", {}).items()])
    lost = ("killed_lane_c", "killed_lane_ran", "undisturbed_s", "killed_lane_s", "killed_lane_s_from_kill")
    yield table(list(lost), [[_figure(found, name, "{:.3g}") for name in lost]])


def loss_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Tokens when a lane is lost."""
    columns = ("configuration", "requests", "tokens_compared", "accepted_tokens", "verifier_losses", "diverged", "differs_from_undisturbed",
               "unexplained")  # fmt: skip
    yield table(list(columns), [[str(row.get(name, _MISSING)) for name in columns] for row in found["rows"]])


TABLES: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {"placement": placement_tables, "lanes": lanes_tables, "loss": loss_tables}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, without columns that are empty in all rows; none without rows."""
    if not rows:
        return ""
    shown = [column for column in range(len(header)) if any(row[column] for row in rows)]
    lines = [[row[column] for column in shown] for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _step(row: Mapping[str, Any]) -> list[str]:
    shared = _figure(row, "shared_gpu_idle", "{:.0%}")
    idle = [shared, shared] if shared else [_figure(row, f"{name}_gpu_idle", "{:.0%}") for name in ("verifier", "drafter")]
    parts = [_figure(row, name, "{:.2f}") for name in ("draft_ms", "draft_hop_ms", "hop_ms", "forward_ms", "period_ms")]
    return [_NAMES.get(row["drafter"], "none"), row["placement"], str(row["c"]), *parts, *idle]


def _figure(row: Mapping[str, Any] | None, name: str, pattern: str) -> str:
    return _MISSING if row is None or row.get(name) is None else pattern.format(row[name])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes what there is to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args(arguments).folder
    for name, tables in TABLES.items():
        path = folder / f"two_gpus-{name}.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            sys.stdout.write("".join(f"{text}\n" for text in tables(found) if text))


if __name__ == "__main__":
    main()
