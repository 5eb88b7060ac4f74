"""`specwire bench serve` beside GuideLLM, an independent load generator, at one HTTP service: do their figures agree?

pip install guidellm    (into an environment of its own: it needs much)
python -m benchmarks.load_generators --guidellm ENVIRONMENT/bin/guidellm

Drafter and verifier are scripted, rounds take their time, and both send the same prompts, in turns: some requests at once, and some a second.
What is compared are medians of the runs. The exit status is 1 where a figure differs by more than 10%.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.http_load_stack import http_stack
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from tests.scripted.scripts import LETTERS

logger = logging.getLogger(__name__)

MAX_DIFFERENCE = 0.1
"""Of two figures, of the smaller one."""
PROGRAMS = ("guidellm", "bench_serve")
PROMPT_LEN, OUTPUT_LEN = 64, 128
_SLOTS = 16
"""More than there ever are requests, so that none waits for others."""


@dataclass(frozen=True, slots=True)
class Load:
    """The same load in the words of both programs.

    Attributes:
        guidellm: its profile.
        ours: flags of `bench serve`.
        judges_ttft: with a fixed number at once, a request follows an answer, and waits for the round that has just begun: how soon after the answer
            a program sends it is a part of its TTFT.
    """

    name: str
    guidellm: str
    ours: tuple[str, ...]
    judges_ttft: bool


def loads(concurrency: int, rate: float) -> list[Load]:
    return [
        Load(f"{concurrency} at once", f"kind=concurrent,streams={concurrency}", ("--max-concurrency", str(concurrency)), judges_ttft=False),
        Load(f"{rate:g} a second", f"kind=constant,rate={rate}", ("--request-rate", str(rate), "--burstiness", "10000"), judges_ttft=True),
    ]


def write_prompts(path: Path, number: int) -> None:
    """Of as many tokens as letters, in a form that both read."""
    rng = random.Random(0)
    prompts = ["".join(map(chr, rng.choices(LETTERS, k=PROMPT_LEN))) for _ in range(number)]
    path.write_text("".join(json.dumps({"prompt": prompt, "output_tokens_count": OUTPUT_LEN}) + "\n" for prompt in prompts), encoding="utf-8")


def run_guidellm(program: Path, url: str, load: Load, prompts: Path, number: int) -> dict[str, float]:
    """Its figures. What it calls inter-token latency is `tpot` of `bench serve`: (latency - TTFT) / (tokens - 1)."""
    words = [
        f"--backend=kind=openai_http,target={url},request_format=/v1/completions,max_tokens={OUTPUT_LEN}",
        f"--profile={load.guidellm}",
        f"--constraint=kind=max_requests,count={number}",
        f"--data=kind=json_file,path={prompts}",
        "--disable-console",
    ]
    report = _run([str(program), "run", *words], lambda path: f"--output=kind=json,path={path}")
    metrics = report["benchmarks"][0]["metrics"]
    ttft_ms, latency_s = metrics["time_to_first_token_ms"]["successful"], metrics["request_latency"]["successful"]
    return {
        "completed": metrics["request_totals"]["successful"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "mean_tpot_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "mean_e2el_ms": 1000 * latency_s["mean"],
        "mean_ttft_ms": ttft_ms["mean"],
        "median_ttft_ms": ttft_ms["median"],
    }


def run_ours(url: str, load: Load, prompts: Path, number: int) -> dict[str, float]:
    """Its figures."""
    words = ["--backend", "openai", "--base-url", url, "--prompts", prompts, "--num-prompts", number, "--output-len", OUTPUT_LEN, "--ignore-eos"]
    report = _run([sys.executable, "-m", "specwire.cli", "bench", "serve", *map(str, words), *load.ours], lambda path: f"--output={path}")
    names = ("completed", "mean_tpot_ms", "mean_e2el_ms", "mean_ttft_ms", "median_ttft_ms")
    return {"output_tokens_per_s": report["output_throughput"]} | {name: report[name] for name in names}


def _run(command: list[str], output: Callable[[Path], str]) -> dict[str, Any]:
    """The JSON that a program writes to the file that the last argument names."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "report.json"
        done = subprocess.run([*command, output(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise SystemExit(f"{' '.join(command[:4])} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        return dict(json.loads(path.read_text(encoding="utf-8")))


def compare(load: Load, theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Each figure: all runs, and how far the medians are apart, of the smaller one."""
    rows = []
    for name in (name for name in ours[0] if name != "completed"):
        runs = [run[name] for run in theirs], [run[name] for run in ours]
        low, high = sorted(map(statistics.median, runs))
        rows.append(
            {
                "load": load.name,
                "figure": name,
                **{program: [round(value, 2) for value in values] for program, values in zip(PROGRAMS, runs, strict=True)},
                "difference": round(high / low - 1, 4),
                "is_judged": load.judges_ttft or "ttft" not in name,
            }
        )
    return rows


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All loads, both programs in turns at one service."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="specwire-load-") as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, args.requests)
        async with http_stack(folder, _SLOTS, 1, args.round_ms) as stack:
            for load in loads(args.concurrency, args.rate):
                theirs, ours = [], []
                for _ in range(args.repeats):
                    ours.append(await asyncio.to_thread(run_ours, stack.url, load, prompts, args.requests))
                    theirs.append(await asyncio.to_thread(run_guidellm, args.guidellm, stack.url, load, prompts, args.requests))
                    logger.info("%s: GuideLLM %s, bench serve %s", load.name, theirs[-1], ours[-1])
                    assert theirs[-1]["completed"] == ours[-1]["completed"] == args.requests, "some requests failed"
                rows += compare(load, theirs, ours)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, help="the program")
    parser.add_argument("--requests", type=int, default=60, help="of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program and load")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2.7, help="requests a second")
    parser.add_argument("--round-ms", type=float, default=30.0, help="what a round of the verifier takes besides its own work")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for load_generators.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    bystanders = Bystanders()
    rows = asyncio.run(measure(args))
    print_table(
        ["load", "figure", "GuideLLM", "bench serve", "apart"],
        [[row["load"], row["figure"], *(f"{statistics.median(row[name]):.1f}" for name in PROGRAMS), f"{row['difference']:.1%}"] for row in rows],
    )
    version = subprocess.run([args.guidellm, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout.strip()
    figures = {
        "guidellm_version": version, "requests": args.requests, "prompt_len": PROMPT_LEN, "output_len": OUTPUT_LEN, "round_ms": args.round_ms,
        "difference_at_most": MAX_DIFFERENCE, "rows": rows,
    }  # fmt: skip
    print(f"written to {write_report('load_generators', figures, args.output, bystanders)}")
    if apart := [
        f"{row['load']}: {row['figure']} is {row['difference']:.1%} apart" for row in rows if row["is_judged"] and row["difference"] > MAX_DIFFERENCE
    ]:
        raise SystemExit("\n".join(apart))


if __name__ == "__main__":
    main()
