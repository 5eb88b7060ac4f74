"""What a draft model costs beyond its passes: drafts and verification through all services beside devices that are not there: passes take set times.

python -m benchmarks.draft_path [--sequences N ...] [--slowdown X]

Everything is real but for the models. Prompts are sent twice: first new, then as both prefix caches have them. On a machine with few cores the
services are slow, and the devices are made slower, too, by a factor; what belongs to devices is given divided by it, hops and CPU time as they are.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.draft_path_peers import VOCAB_SIZE, K
from benchmarks.gpu.load import random_prompts, run_batch
from benchmarks.host_path import cpu_ms
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire import rpc
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, flags
from specwire.launch import ServiceSpec, Supervisor
from specwire.messages import CoordinatorStatus
from specwire.speculative_config import SpeculativeConfig

_NUM_PROMPT_TOKENS = 512
_NUM_REPEATS = 3
_CAUSES = ("catching_up", "drafter_timeout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--slowdown", type=float, default=4.0, help="of the devices; waits for drafts are longer likewise")
    parser.add_argument("--tokens", type=int, default=129, help="of each sequence")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for draft_path.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    results = [row for num_seqs in args.sequences for row in asyncio.run(measure(num_seqs, args.slowdown, args.tokens))]
    print_table(list(results[0]), [[value if isinstance(value, str) else f"{value:g}" for value in row.values()] for row in results])
    figures = {"unit": "ms a step, sums over rows", "slowdown": args.slowdown, "tokens": args.tokens, "results": results}
    print(f"\nwritten to {write_report('draft_path', figures, args.output, bystanders)}")


async def measure(num_seqs: int, slowdown: float, num_tokens: int) -> list[dict[str, Any]]:
    """One number of sequences: a row for new prompts, then one for the same again."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        verifier, drafter, coordinator = (f"unix:{folder}/{name}" for name in ("verifier", "drafter", "coordinator"))
        sizes = str(num_seqs), str(_NUM_PROMPT_TOKENS + num_tokens + 64), str(slowdown)
        config = CoordinatorConfig(
            listen=(coordinator,), verifiers=(verifier,), drafters=(drafter,), max_stream_backlog=1 << 20, max_decode_gap_ms=0.0,
            min_draft_wait_ms=5.0 * slowdown,
            speculative_config=SpeculativeConfig(method="draft_model", model="none", num_speculative_tokens=K),
        )  # fmt: skip
        groups = [
            [
                ServiceSpec("verifier", "benchmarks.draft_path_peers", ("verifier", verifier, *sizes), verifier),
                ServiceSpec("drafter", "benchmarks.draft_path_peers", ("drafter", drafter, *sizes), drafter),
            ],
            [ServiceSpec("coordinator", "coordinator", ("--config=", *flags(config)), coordinator)],
        ]
        supervisor = Supervisor(groups, _log_line, startup_timeout_s=180.0)
        try:
            await supervisor.start()
            async with AsyncClient(coordinator) as client, rpc.open_channel(coordinator) as channel:
                await client.wait_ready()
                while not (await client.get_status()).drafters[0].is_connected:  # each call takes its time
                    pass
                pids = [pid for service in ("verifier", "drafter", "coordinator") if (pid := _pid(supervisor, service))]
                prompts = random_prompts(VOCAB_SIZE, num_seqs, _NUM_PROMPT_TOKENS)
                rows = []
                for kind, count in (("new", 1), ("cached", _NUM_REPEATS)):
                    rows.append({"sequences": num_seqs, "prompts": kind} | await _repeat(client, channel, prompts, num_tokens, count, pids, slowdown))
                return rows
        finally:
            await supervisor.stop()


async def _repeat(
    client: AsyncClient, channel: Any, prompts: list[list[int]], num_tokens: int, count: int, pids: list[int], slowdown: float
) -> dict[str, float]:
    """So many batches, and what was counted meanwhile."""
    before, cpu_before = await client.get_status(), [cpu_ms(pid) for pid in pids]
    seconds, num_steps, num_drafted = [], 0, 0
    for _ in range(count):
        generated = await run_batch(channel, prompts, num_tokens)
        seconds.append(generated.seconds)
        num_steps += generated.spec.num_steps
        num_drafted += generated.spec.num_drafts
    cpu = [cpu_ms(pid) - earlier for pid, earlier in zip(pids, cpu_before, strict=True)]
    after = await client.get_status()
    num_rounds = _num_rounds(after) - _num_rounds(before)
    times = after.lanes[0].times
    return {
        "batch_ms": round(sum(seconds) / count / slowdown * 1e3, 1),
        "slowest_ms": round(max(seconds) / slowdown * 1e3, 1),
        "rounds": num_rounds / count,
        "drafted": round(num_drafted / num_steps, 4),
        **{cause: after.fallbacks_by_cause.get(cause, 0) - before.fallbacks_by_cause.get(cause, 0) for cause in _CAUSES},
        "step_ms": round(times.step_ms / slowdown, 2),
        "propose_ms": round(times.propose_ms / slowdown, 2),
        "hop_ms": round(times.verify_hop_ms, 2),
        **{f"{name}_cpu": round(ms / num_rounds, 2) for name, ms in zip(("verifier", "drafter", "coordinator"), cpu, strict=True)},
    }


def _num_rounds(status: CoordinatorStatus) -> int:
    return status.lanes[0].num_steps


def _pid(supervisor: Supervisor, name: str) -> int | None:
    return next(service.pid for group in supervisor.groups for service in group if service.spec.name == name)


def _log_line(name: str, line: str) -> None:
    if " INFO " not in line or "chunks of" in line:
        print(f"{name}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
