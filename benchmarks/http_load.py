"""Many streaming HTTP clients at once: what front ends add up to, what a step costs the coordinator beside them, and whether memory stays flat.

python -m benchmarks.http_load [--front-ends 0 1 2 4] [--round-ms 60 0] [--minutes 0.5]

Scripted drafter and verifier, coordinator, HTTP service and its processes: all of them processes of this machine, as are the clients (one process).
Every text is compared with what the scripted target alone gives. The coordinator's CPU time a step stands beside that of one gRPC stream with as many
sequences and of benchmarks.overhead's echo, which knows neither requests nor HTTP. With rounds that take their time, as a GPU's do, all sequences
are in each step; without, everything goes as fast as the front ends and the machine let it, and fewer of them are.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.http_load_clients import Clients, Tally
from benchmarks.http_load_stack import HttpStack, Usage, http_stack
from benchmarks.overhead import MAX_ABOVE_ECHO_MS, make_script, run
from benchmarks.overhead_services import ACCEPTANCE, K
from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from benchmarks.soak import MAX_GROWTH_MIB, Sample, rss_growth_mib
from specwire.client import AsyncClient

_WARM_UP_S = 8.0
_NUM_SAMPLES = 60
_MIN_SAMPLE_S = 0.5
_LONG_S = 240.0
"""From here on memory must be flat: before, caches and pools may still fill."""
_BASELINE_STEPS = 200
_TOKENS_PER_ROW = sum(ACCEPTANCE**i for i in range(K + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256, help="requests at any time")
    parser.add_argument(
        "--front-ends", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of processes of the HTTP service; 0 = one gRPC stream"
    )
    parser.add_argument("--minutes", type=float, default=0.5, help="what is measured of each, after a warm-up of 8 s")
    parser.add_argument("--round-ms", type=float, nargs="+", default=[60.0, 0.0], help="what a round of the verifier takes besides its own work")
    parser.add_argument("--baseline-rounds", type=int, default=3, help="runs of coordinator and echo without HTTP, in turns")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--name", default="http_load", help="of the file there, and of the benchmark in it")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bystanders = Bystanders()
    baselines = {round_ms: asyncio.run(measure_baseline(args.clients, args.baseline_rounds, round_ms)) for round_ms in args.round_ms}
    results = [
        asyncio.run(measure(args.clients, number, 60 * args.minutes, round_ms, baselines[round_ms]["echo_cpu_ms"]))
        for round_ms, number in itertools.product(args.round_ms, args.front_ends)
    ]
    columns = [
        "round_ms",
        "front_ends",
        "requests_per_s",
        "tokens_per_s",
        "ttft_median_ms",
        "step_ms",
        "rows_per_step",
        "coordinator_cpu_ms",
        "above_echo_ms",
        "front_end_us_per_event",
    ]
    print_table(columns, [[f"{result[column]:g}" for column in columns] for result in results])
    for result in results:
        growth = f"memory {result['memory']}: grew by {result['rss_growth_mib']} MiB of {result['rss_mib']}"
        print(f"{result['round_ms']:g} ms, {result['front_ends']} front ends: cores {result['cores']}, {growth}")
    for baseline in baselines.values():
        print(f"without HTTP: {baseline}")
    figures = {
        "unit": "CPU: user and system time; above_echo_ms: the coordinator's CPU time a step without that of the echo",
        "num_speculative_tokens": K, "acceptance": ACCEPTANCE, "clients": args.clients, "minutes": args.minutes,
        "without_http": list(baselines.values()), "results": results,
    }  # fmt: skip
    print(f"written to {write_report(args.name, figures, args.output, bystanders)}")
    if problems := [f"{result['front_ends']} front ends: {problem}" for result in results for problem in result["problems"]]:
        raise SystemExit("\n".join(problems))


async def measure_baseline(num_seqs: int, num_rounds: int, round_ms: float) -> dict[str, Any]:
    """As many sequences on one gRPC stream, and the echo of their messages, with the same pauses: CPU ms a step, medians of the rounds."""
    num_tokens = round(1.25 * _BASELINE_STEPS * sum(ACCEPTANCE**i for i in range(K + 1)))
    coordinators, echoes = [], []
    for _ in range(num_rounds):
        coordinators.append(await run("coordinator", num_seqs, num_tokens, round_ms=round_ms))
        echoes.append(await run("echo", num_seqs, num_tokens, make_script(coordinators[-1]), round_ms=round_ms))
    coordinator_ms, echo_ms = (statistics.median(each.cpu_ms for each in runs) for runs in (coordinators, echoes))
    limit = {"above_echo_ms_at_most": MAX_ABOVE_ECHO_MS[num_seqs]} if num_seqs in MAX_ABOVE_ECHO_MS else {}
    return {
        "round_ms": round_ms,
        "coordinator_cpu_ms": round(coordinator_ms, 3),
        "echo_cpu_ms": round(echo_ms, 3),
        "above_echo_ms": round(coordinator_ms - echo_ms, 3),
        **limit,
    }


async def measure(num_clients: int, num_front_ends: int, seconds: float, round_ms: float, echo_cpu_ms: float) -> dict[str, Any]:
    """Everything about one number of front ends."""
    with tempfile.TemporaryDirectory(prefix="specwire-http-") as name:
        async with http_stack(Path(name), num_clients, num_front_ends, round_ms) as stack:
            clients = Clients(stack.url, stack.address, num_clients)
            clients.start()
            await asyncio.sleep(_WARM_UP_S)
            warm_up, clients.tally = clients.tally, Tally()
            own_s = time.process_time()
            usages = await _watch(stack, seconds)
            own_s = time.process_time() - own_s
            tally, clients.tally = clients.tally, Tally()
            await clients.stop()
            left = await _num_left(stack.address)
    problems = warm_up.problems + tally.problems + clients.tally.problems + ([f"the coordinator still holds {left} sequences"] if left else [])
    return describe(round_ms, num_front_ends, usages, tally, own_s, echo_cpu_ms, problems)


def describe(
    round_ms: float, num_front_ends: int, usages: list[Usage], tally: Tally, own_s: float, echo_cpu_ms: float, problems: list[str]
) -> dict[str, Any]:
    """For JSON; memory is that of all processes of a service."""
    first, last = usages[0], usages[-1]
    seconds, num_steps = last.time_s - first.time_s, last.num_steps - first.num_steps
    cpu_s = {name: last.cpu_s[name] - first.cpu_s[name] for name in last.cpu_s}
    coordinator_ms = 1000 * cpu_s["coordinator"] / num_steps
    samples = {
        name: [Sample(usage.time_s - first.time_s, usage.rss_mib[name]) for usage in usages]
        for name in ("coordinator", "http")
        if name in first.rss_mib
    }
    growth = {name: rss_growth_mib(of_service) for name, of_service in samples.items()}
    allowed = {"coordinator": MAX_GROWTH_MIB, "http": MAX_GROWTH_MIB * num_front_ends}
    grown = [f"the memory of {name} grew by {mib:.1f} MiB" for name, mib in growth.items() if mib > allowed[name]]
    verdict = f"too short to say: less than {_LONG_S:g} s"
    if seconds >= _LONG_S:
        problems, verdict = problems + grown, "grows" if grown else "flat"
    return {
        "round_ms": round_ms,
        "front_ends": num_front_ends,
        "seconds": round(seconds, 1),
        "answers": tally.answers,
        "num_problems": tally.num_problems,
        "requests_per_s": round(tally.answers / seconds, 1),
        "tokens_per_s": round(tally.tokens / seconds),
        "events_per_s": round(tally.events / seconds),
        "ttft_median_ms": round(1000 * statistics.median(tally.ttfts_s), 1),
        "steps": num_steps,
        "step_ms": round(1000 * seconds / num_steps, 2),
        "rows_per_step": round(tally.tokens / (num_steps * _TOKENS_PER_ROW), 1),
        "requests_per_step": round(tally.answers / num_steps, 2),
        "coordinator_cpu_ms": round(coordinator_ms, 3),
        "above_echo_ms": round(coordinator_ms - echo_cpu_ms, 3),
        "front_end_us_per_event": round(1e6 * cpu_s.get("http", 0.0) / tally.events, 1),
        "cores": {name: round(used / seconds, 2) for name, used in [*cpu_s.items(), ("clients", own_s)]},
        "rss_mib": {name: round(last.rss_mib[name], 1) for name in samples},
        "rss_growth_mib": {name: round(mib, 2) for name, mib in growth.items()},
        "rss_allowed_growth_mib": {name: allowed[name] for name in growth},
        "memory": verdict,
        "process_mib": {
            name: [round(usage.process_mib[name], 2) for usage in usages if name in usage.process_mib]
            for name in first.process_mib
            if name.startswith(("coordinator", "http"))
        },
        "rss_samples": {name: [[round(one.time_s, 1), round(one.rss_mib, 2)] for one in of_service] for name, of_service in samples.items()},
        "problems": problems,
    }


async def _watch(stack: HttpStack, seconds: float) -> list[Usage]:
    """What is used, looked at from time to time."""
    usages = [await stack.usage()]
    pause_s = max(_MIN_SAMPLE_S, seconds / _NUM_SAMPLES)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                await asyncio.sleep(pause_s)
                usages.append(await stack.usage())
    return [*usages, await stack.usage()]


async def _num_left(address: str) -> int:
    async with AsyncClient(address) as client:
        status = await client.get_status()
        return status.num_waiting + sum(lane.num_running for lane in status.lanes)


if __name__ == "__main__":
    main()
