"""Runs the drafter-invariance matrix on the default model and writes what it found as JSON. Takes 20 minutes and more on 2 cores.

python -m benchmarks.invariance [--prompts 12] [--max-tokens 64] [--only NAME ...] [--head FOLDER] [--only-head] [--jobs 2] [--work FILE]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, describe_versions, write_report
from specwire.config import DEFAULT_MODEL
from specwire.engine.checkpoint import resolve_model
from specwire.engine.models.hashing import weights_hash
from tests.integration.invariance import check, compare, run, transformers_greedy
from tests.integration.matrix import HEAD, MAX_MODEL_LEN, Case, Configuration, fleet_configs, full_matrix, head_method, load_cases
from tests.integration.noisy_model import ACCEPTANCE_RANGE, NOISE_SCALE
from tests.integration.reference import Expected, OneTokenLoop
from tests.integration.stack import NUM_THREADS, Fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for invariance.json, or invariance_METHOD.json with --only-head")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations; all if none is given")
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of a draft head of the model")
    parser.add_argument("--only-head", action="store_true", help="configurations in which the head drafts, alone")
    parser.add_argument("--jobs", type=int, default=1, help="configurations at once, each among services of its own")
    parser.add_argument("--work", type=Path, help="file of finished configurations: a call that was cut goes on at its next one")
    args = parser.parse_args()
    report = run_matrix(args.prompts, args.max_tokens, args.only, args.head, only_head=args.only_head, num_jobs=args.jobs, work=args.work)
    path = write_report("invariance" + (f"_{head_method(args.head)}" if args.only_head else ""), report, args.results)
    print(f"{path}: {json.dumps(report['total'])}")


def run_matrix(
    num_prompts: int = 12, max_tokens: int = 64, only: Sequence[str] = (), head: Path = HEAD, *, only_head: bool = False, num_jobs: int = 1,
    work: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs the configurations that `work` lacks; raises AssertionError for the first one with a difference that nothing excuses."""
    started = time.monotonic()
    folder = resolve_model(DEFAULT_MODEL)
    target = OneTokenLoop(folder, MAX_MODEL_LEN, NUM_THREADS)
    cases = load_cases(target.tokenizer, num_prompts, max_tokens=max_tokens)
    expected = {index: target.generate(case.prompt_token_ids, case.params) for index, case in enumerate(cases)}
    _say(started, f"reference: {sum(len(e.token_ids) for e in expected.values())} tokens of {len(cases)} requests")
    method = head_method(head)
    chosen = [c for c in full_matrix(method) if (not only or c.name in only) and (c.has_head(method) or not only_head)]
    model = {"name": DEFAULT_MODEL, "weights": weights_hash(folder)[:16], "draft_noise_scale": NOISE_SCALE, "head": head.name}
    settings = {"model": model, "prompts": num_prompts, "max_tokens": max_tokens}
    found = read_rows(work, settings) if work else {}
    left = [configuration for configuration in chosen if configuration.name not in found]
    with get_context("spawn").Pool(num_jobs) as pool:
        arguments = [(left[first::num_jobs], cases, expected, head, started, settings, work) for first in range(num_jobs)]
        found |= {result["configuration"]: result for share in pool.starmap(run_share, arguments, chunksize=1) for result in share}
    results = [found[configuration.name] for configuration in chosen]
    drafted = [result for result in results if result["configuration"].startswith("draft_model")]
    for result in drafted:
        assert ACCEPTANCE_RANGE[0] <= result["first_draft_acceptance"] <= ACCEPTANCE_RANGE[1], f"the noise does not fit: {result}"
    greedy = [index for index, case in enumerate(cases) if case.params.is_greedy]
    texts = transformers_greedy(folder, [cases[index] for index in greedy])
    differences = [compare(cases[i], expected[i], text, expected[i].finish_reason) for i, text in zip(greedy, texts, strict=True)]
    excused = [difference for difference in differences if difference is not None]
    assert all(difference.is_excused for difference in excused), f"transformers generates other tokens: {excused[0]}"
    _say(started, f"transformers: {len(greedy)} greedy texts, {len(excused)} excused differences")
    return {
        "what": "token ids of each configuration against a one-token loop through the engine, in float32",
        "duration_s": round(time.monotonic() - started),
        "threads_per_service": NUM_THREADS,
        **settings,
        "samplings": list(dict.fromkeys(case.sampling for case in cases)),
        "reference": {
            "requests": len(cases),
            "tokens": sum(len(e.token_ids) for e in expected.values()),
            "near_ties": sum(margin.is_near_tie for e in expected.values() for margin in e.margins),
        },
        "transformers_greedy": {"requests": len(greedy), "differences_excused": len(excused), "differences": 0},
        "configurations": results,
        "total": {
            "configurations": len(results),
            "tokens_compared": sum(result["tokens_compared"] for result in results),
            "differences_excused": sum(result["differences_excused"] for result in results),
            "differences": sum(result["differences"] for result in results),
        },
    }


def read_rows(work: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows that `run_share` wrote of the same settings, by configuration."""
    lines = work.read_text(encoding="utf-8").splitlines() if work.is_file() else []
    return {line["row"]["configuration"]: line["row"] for line in map(json.loads, lines) if line["settings"] == settings}


def run_share(
    share: Sequence[Configuration], cases: Sequence[Case], expected: Mapping[int, Expected], head: Path, started: float,
    settings: Mapping[str, Any], work: Path | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Some of the configurations, one after the other; their rows of the report."""
    results, versions = [], describe_versions()
    with tempfile.TemporaryDirectory(prefix="sw-") as sockets:
        fleet = Fleet(Path(sockets), fleet_configs(head=head))
        try:
            for configuration in share:
                outcome = asyncio.run(run(configuration, fleet, Path(sockets), cases, expected))
                results.append(outcome.to_json() | {"specwire": versions["specwire"]})
                _say(started, json.dumps(results[-1]))
                check(outcome)
                if work:
                    with work.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"settings": settings, "row": results[-1]}) + "\n")
        finally:
            fleet.stop()
    return results


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:7.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
