"""`specwire advise` on three workloads, chat, copy-heavy summaries and code: do the decisions differ, and by which figures?

python -m benchmarks.advise_reports prompts_bench.jsonl.gz

The services are those of `specwire up` with the default model and `ngram`, started here. Each workload leaves a JSON report and a page for people.
"""

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.advise_workloads import read_lines, workloads, write_prompts
from benchmarks.report import RESULTS, Bystanders, print_table, write_report

logger = logging.getLogger(__name__)

NAMES = ("chat", "summaries", "code")
_READY = re.compile(r"ready: coordinator (\S+)")


def start(weights: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The services, and the coordinator's address."""
    command = [sys.executable, "-m", "specwire.cli", "up", "--config=", "--port", "0", "--http-port", "0", "--weights", weights]
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None, "it is piped"
    for line in process.stderr:
        if found := _READY.search(line):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a pipe that is full would stop the services
            return process, found.group(1)
    raise RuntimeError(f"`specwire up` ended with status {process.wait()} before it was ready")


def advise(address: str, prompts: Path, output: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What it decided, from its report."""
    sizes = ["--output-len", arguments.output_len, "--step-len", 32, "--repeats", arguments.repeats, "--online-seconds", arguments.online_seconds]
    for flag, rate in (("--low-rate", arguments.low_rate), ("--high-rate", arguments.high_rate)):
        sizes += [flag, rate] if rate is not None else []
    command = [sys.executable, "-m", "specwire.cli", "advise", "--address", address, "--prompts", prompts, "--chat", "--output", output, *sizes]
    subprocess.run([*map(str, command)], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return dict(json.loads((output / "advice.json").read_text(encoding="utf-8")))


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What decided, without single answers' figures."""
    workload = report["workload"]
    keys = "headline", "verdict", "reasons", "doubts", "notes", "speculative_config", "workload", "candidates", "online", "canary", "measured_steps"
    return {key: report[key] for key in keys} | {
        "acceptance_length": report["acceptance"]["groups"][0]["acceptance_length"],
        "tokens_per_step_by_k": report["tokens_per_step_by_k"],
        "drafted_share": report["drafted_share_by_k"][-1],
        "schedule": report["num_speculative_tokens_per_batch_size"],
        "repeated_share": workload["repetition"]["in_prompt"] + workload["repetition"]["in_answer"],
    }


def row(name: str, report: dict[str, Any]) -> list[str]:
    """Of the table."""
    gains = [f"{rate['tpot_gain']:+.0%} / {rate['throughput_gain']:+.0%}" for rate in report["online"]] or ["-", "-"]
    figures = [f"{report['repeated_share']:.0%}", f"{report['acceptance_length']:.2f}", f"{report['tokens_per_step_by_k'][-1]:.2f}"]
    return [name, *figures, *gains, report["verdict"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--number", type=int, default=16, help="prompts of each workload")
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--online-seconds", type=float, default=10.0)
    parser.add_argument("--low-rate", type=float, help="requests a second; by default a share of what plain decoding serves, as is the high one")
    parser.add_argument("--high-rate", type=float)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        chosen = workloads(read_lines(arguments.prompts), arguments.number)
        write_prompts({name: chosen[name] for name in arguments.only}, folder / "prompts")
        process, address = start(arguments.weights, folder)
        try:
            for path in sorted((folder / "prompts").iterdir()):
                bystanders = Bystanders()
                report = summary(advise(address, path, folder / path.stem, arguments))
                logger.info("%s: %s", path.stem, report["headline"])
                write_report(f"advise-{path.stem}", report, arguments.results, bystanders)
                page = (folder / path.stem / "advice.md").read_text(encoding="utf-8")
                (arguments.results / f"advise-{path.stem}.md").write_text(without_pictures(page), encoding="utf-8")
                rows.append(row(path.stem, report))
        finally:
            process.terminate()
            process.wait(60)
    header = ["workload", "repeated", "acceptance length", "tokens a step", "low: saved / more", "high: saved / more", "verdict"]
    print_table(header, rows)


def without_pictures(page: str) -> str:
    """They stay where they are."""
    return "\n".join(line for line in page.splitlines() if not line.startswith("![")).rstrip() + "\n"


if __name__ == "__main__":
    main()
