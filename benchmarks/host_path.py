"""What the services' own work allows: plain decoding through verifier and coordinator beside a device that is not there: a round takes a set time.

python -m benchmarks.host_path [--sequences N ...] [--rounds-in-flight W ...] [--device-ms MS]

Everything is real but for the model: the verifier plans, packs and launches each round, waits until its time has passed, and answers token 0. A step
that takes longer than the device is one that the services hold up. CPU time is what the processes took a round, gRPC and kernel included.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.load import random_prompts, run_batch
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire import rpc
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, flags
from specwire.launch import ServiceSpec, Supervisor

_NUM_PROMPT_TOKENS = 20
_VOCAB_SIZE = 1000
_NUM_BATCHES = 3
logger = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--rounds-in-flight", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device-ms", type=float, default=2.0, help="what the device takes for a round")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for host_path.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results = [
        asyncio.run(measure(num_seqs, num_rounds, args.device_ms, args.steps)) for num_rounds in args.rounds_in_flight for num_seqs in args.sequences
    ]
    print_table(list(results[0]), [[f"{value:g}" for value in result.values()] for result in results])
    figures = {"unit": "ms a step, medians of batches", "device_ms": args.device_ms, "steps": args.steps, "results": results}
    print(f"\nwritten to {write_report('host_path', figures, args.output, bystanders)}")


async def measure(num_seqs: int, num_rounds: int, device_ms: float, num_steps: int) -> dict[str, float]:
    """One number of sequences with one number of rounds in flight."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        verifier, coordinator = f"unix:{folder}/verifier", f"unix:{folder}/coordinator"
        arguments = (verifier, str(num_seqs), str(num_rounds), str(device_ms), str(_NUM_PROMPT_TOKENS + num_steps + 16))
        config = CoordinatorConfig(
            listen=(coordinator,), verifiers=(verifier,), max_outstanding_rounds=num_rounds, max_stream_backlog=1 << 20, max_decode_gap_ms=0.0
        )  # fmt: skip
        groups = [
            [ServiceSpec("verifier", "benchmarks.host_path_verifier", arguments, verifier)],
            [ServiceSpec("coordinator", "coordinator", ("--config=", *flags(config)), coordinator)],
        ]
        supervisor = Supervisor(groups, _log_line, startup_timeout_s=120.0)
        try:
            await supervisor.start()
            async with AsyncClient(coordinator) as client, rpc.open_channel(coordinator) as channel:
                await client.wait_ready()
                pids = [group[0].pid for group in supervisor.groups]
                return {"sequences": num_seqs, "W": num_rounds} | await _generate(channel, [pid for pid in pids if pid], num_seqs, num_steps)
        finally:
            await supervisor.stop()


async def _generate(channel: Any, pids: Sequence[int], num_seqs: int, num_steps: int) -> dict[str, float]:
    prompts = random_prompts(_VOCAB_SIZE, num_seqs, _NUM_PROMPT_TOKENS)
    await run_batch(channel, prompts, _NUM_PROMPT_TOKENS)
    batches = []
    for _ in range(_NUM_BATCHES):
        before, started = [cpu_ms(pid) for pid in pids], time.perf_counter()
        generated = await run_batch(channel, prompts, num_steps)
        wall_ms = (time.perf_counter() - started) * 1e3 / num_steps
        times = [time_ns for time_ns, _ in generated.arrivals]
        gap_ms = statistics.median(later - earlier for earlier, later in pairwise(times)) / 1e6
        batches.append((gap_ms, wall_ms, *((cpu_ms(pid) - earlier) / num_steps for pid, earlier in zip(pids, before, strict=True))))
    names = ("between answers", "batch a step", "verifier CPU", "coordinator CPU")
    return dict(zip(names, (round(statistics.median(values), 3) for values in zip(*batches, strict=True)), strict=True))


def cpu_ms(pid: int) -> float:
    """User and system time of a process, in steps of its clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 10.0


def _log_line(name: str, line: str) -> None:
    if " INFO " not in line:
        print(f"{name}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
