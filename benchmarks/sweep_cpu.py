"""`specwire sweep` on a CPU, with the default model and ngram, at 1, 4 and 16 requests at once: throughput against the speed that one user sees.

Without drafts, with fixed K, with the best K by batch size and with adaptive verification; chat, copy-heavy summaries and code, in turn.

python -m benchmarks.sweep_cpu prompts_bench.jsonl.gz

Writes sweep_cpu.json among the results, and the picture for the documentation; needs matplotlib (`specwire[plots]`).
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.advise_workloads import mixed, read_lines, workloads, write_prompts
from benchmarks.report import RESULTS

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--number", type=int, default=16, help="prompts of each workload")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--fixed", default="1,3,5")
    parser.add_argument("--prompts-per-user", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for sweep_cpu.json")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder for sweep-cpu.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts({"mixed": mixed(workloads(read_lines(arguments.prompts), arguments.number))}, folder)
        sizes = ("concurrency", "fixed", "prompts_per_user", "output_len", "repeats")
        flags = [word for size in sizes for word in (f"--{size.replace('_', '-')}", str(getattr(arguments, size)))]
        command = ["-m", "specwire.cli", "sweep", "--config=", "--prompts", "mixed.jsonl", "--chat", "--ready-timeout", "60", *flags, "--output", "."]
        ended = subprocess.run([sys.executable, *command], cwd=folder, stdin=subprocess.DEVNULL, check=False)
        if ended.returncode:
            raise SystemExit(ended.returncode)
        for source, target in (("sweep.json", arguments.results / "sweep_cpu.json"), ("sweep.png", arguments.images / "sweep-cpu.png")):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / source, target)
            print(f"written to {target}")


if __name__ == "__main__":
    main()
