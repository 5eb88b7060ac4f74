"""A drafter that dies, hangs, is late, fails or lies, under streams: what their tokens are and how long they pause."""

import asyncio
import functools
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drills_load import Case, Load
from benchmarks.drills_processes import Service
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.scripted.target import Target

K = 3
ALLOWED_MS = 50.0
"""What a pause may take beyond an undisturbed step and the wait for the drafter."""
MIN_WAIT_MS = 5.0
_LETTERS = (97, 98, 32)  # so few that prompt lookup always finds something, and is right one time in three
_ANSWER_LEN, _MAX_MODEL_LEN = 1500, 2048
_MISSED = re.compile(r"did not answer within ([\d.]+) ms")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much.

    Args:
        step_s: what a round of the verifier takes.
        counts: disturbances of each kind.
        quiet_s: how long the streams run undisturbed to be measured.
        hold_s: how long a stopped drafter stays so; delay_s: how late a late answer comes.
        apart_s: least time from one disturbance to the next; the coordinator's log names one late answer in 5 s.
        settle_s: how long all runs well again before the next one.
        restart_s: between a process's end and its restart.
    """

    counts: dict[str, int]
    num_streams: int = 16
    step_s: float = 0.02
    quiet_s: float = 15.0
    hold_s: float = 2.0
    delay_s: float = 5.0
    apart_s: float = 5.5
    settle_s: float = 0.5
    restart_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Pause:
    """One disturbance: the longest gap of a stream in its time, and how long the coordinator waited for the drafter at most."""

    gap_ms: float
    wait_ms: float


@dataclass(frozen=True, slots=True)
class Stack:
    """A scripted verifier, the drafter that is disturbed, and a coordinator with a client."""

    drafter: Service
    coordinator: Service
    client: AsyncClient


@asynccontextmanager
async def start_stack(folder: Path, plan: Plan) -> AsyncIterator[Stack]:
    """Starts everything, on sockets in `folder`, with prompt lookup."""
    addresses = {name: f"unix:{folder}/{name}" for name in ("verifier", "drafter", "coordinator")}
    fields = {
        "tokenizer": None, "alphabet": _LETTERS, "delay_s": plan.step_s, "max_num_seqs": plan.num_streams, "max_model_len": _MAX_MODEL_LEN,
        "max_num_batched_tokens": 16 * plan.num_streams, "num_blocks": plan.num_streams * _MAX_MODEL_LEN // 4,
    }  # fmt: skip
    scripted = ("tests.scripted", "verifier", addresses["verifier"], *(f"{name}={value!r}" for name, value in fields.items()))
    verifier = Service("verifier", addresses["verifier"], scripted)
    drafter = Service("drafter", addresses["drafter"], lookup_config(addresses["drafter"]), plan.restart_s)
    config = CoordinatorConfig(
        listen=(addresses["coordinator"],), verifiers=(addresses["verifier"],), drafters=(addresses["drafter"],),
        speculative_config=SpeculativeConfig(num_speculative_tokens=K),
    )  # fmt: skip
    coordinator = Service("coordinator", addresses["coordinator"], config)
    async with AsyncExitStack() as resources:
        for service in (verifier, drafter, coordinator):
            await service.start()
            resources.push_async_callback(service.stop)
        await coordinator.wait_for(f"drafter {addresses['drafter']} is there")
        async with AsyncClient(addresses["coordinator"]) as client:
            await client.wait_ready()
            yield Stack(drafter, coordinator, client)


def lookup_config(address: str) -> DrafterConfig:
    return DrafterConfig(listen=(address,), speculative_config=SpeculativeConfig(num_speculative_tokens=K))


def faulty_drafter(address: str, fault: str, plan: Plan) -> tuple[str, ...]:
    """A scripted drafter that goes wrong when it is told to."""
    fields = {"tokenizer_fingerprint": "", "alphabet": _LETTERS, "max_model_len": _MAX_MODEL_LEN, "fault_delay_s": plan.delay_s}
    return ("tests.scripted.faulty", address, fault, *(f"{name}={value!r}" for name, value in fields.items()))


def make_case(stream: int, number: int) -> Case:
    """A long answer with a seed of its own."""
    prompt, seed = [_LETTERS[(stream + number + i * i) % len(_LETTERS)] for i in range(24)], 1000 * stream + number
    expected = functools.partial(Target(_LETTERS).generate, prompt, _ANSWER_LEN, seed)
    return Case(prompt, SamplingParams(max_tokens=_ANSWER_LEN, seed=seed, ignore_eos=True), expected)


async def run_quiet(stack: Stack, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The streams without disturbances: figures, of which step_p99_ms is the undisturbed step, and problems."""
    async with _load(stack, plan) as load:
        started_s = time.monotonic()
        await asyncio.sleep(plan.quiet_s)
        status = await stack.client.get_status()
        gaps_ms = [1000 * (end - start) for start, end in load.gaps if start >= started_s]
    steps = {f"step_p{q}_ms": round(float(np.percentile(gaps_ms, q)), 2) for q in (50, 99)} | {"step_max_ms": round(max(gaps_ms), 2)}
    of_coordinator = {"coordinator_step_p50_ms": round(status.lanes[0].times.step_ms, 2), "reply_p50_ms": round(status.drafters[0].reply_ms, 2)}
    return steps | of_coordinator | load.figures(), load.find_problems()


async def run_drill(stack: Stack, plan: Plan, kind: str, step_p99_ms: float) -> tuple[dict[str, Any], list[str]]:
    """Disturbs as often as planned, each time once all is well again: figures and problems."""
    pauses: list[Pause] = []
    before = await stack.client.get_status()
    async with _load(stack, plan) as load:
        for _ in range(plan.counts[kind]):
            log_start, started_s = len(stack.coordinator.lines), time.monotonic()
            await _DISTURBANCES[kind](stack, plan, load)
            await load.more_accepted()
            await asyncio.sleep(max(plan.settle_s, started_s + plan.apart_s - time.monotonic()))
            waits_ms = [float(found[1]) for line in stack.coordinator.lines[log_start:] if (found := _MISSED.search(line))]
            pauses.append(Pause(1000 * load.longest_gap_s(started_s, time.monotonic()), max([MIN_WAIT_MS, *waits_ms])))
    after = await stack.client.get_status()
    counts = {cause: count - before.fallbacks_by_cause.get(cause, 0) for cause, count in after.fallbacks_by_cause.items()}
    figures = {
        "disturbances": len(pauses),
        **describe_pauses(pauses, step_p99_ms),
        "timeouts": after.drafters[0].num_timeouts - before.drafters[0].num_timeouts,
        "fallbacks": {cause: count for cause, count in counts.items() if count},
        **load.figures(),
    }
    return figures, load.find_problems()


def describe_pauses(pauses: list[Pause], step_p99_ms: float) -> dict[str, Any]:
    """The longest gap of each disturbance, and what is left of it without an undisturbed step, the bounded wait and what is allowed on top:
    at most 0 in 99 of 100."""
    excess_ms = [pause.gap_ms - step_p99_ms - pause.wait_ms - ALLOWED_MS for pause in pauses]
    figures: dict[str, Any] = {}
    for name, values in (("gap", [pause.gap_ms for pause in pauses]), ("wait", [pause.wait_ms for pause in pauses]), ("excess", excess_ms)):
        figures |= {f"{name}_p50_ms": statistics.median(values), f"{name}_p99_ms": float(np.percentile(values, 99)), f"{name}_max_ms": max(values)}
    return {name: round(value, 1) for name, value in figures.items()} | {"is_in_time": bool(np.percentile(excess_ms, 99) <= 0)}


@asynccontextmanager
async def _load(stack: Stack, plan: Plan) -> AsyncIterator[Load]:
    """Streams that all run and get drafts that are accepted; left at the end."""
    load = Load(stack.client, make_case, plan.num_streams)
    load.start()
    try:
        await load.more_tokens(20)
        await load.more_accepted()
        yield load
    finally:
        await load.stop()


async def _kill(stack: Stack, plan: Plan, load: Load) -> None:
    await stack.drafter.kill()
    await stack.drafter.restart()


async def _hang(stack: Stack, plan: Plan, load: Load) -> None:
    stack.drafter.signal(signal.SIGSTOP)
    try:
        await load.more_tokens(4 * (K + 1))
        await asyncio.sleep(plan.hold_s)
    finally:
        stack.drafter.signal(signal.SIGCONT)


async def _go_wrong(stack: Stack, plan: Plan, load: Load) -> None:
    since = len(stack.drafter.lines)
    stack.drafter.signal(signal.SIGUSR1)
    await stack.drafter.wait_for("fault: ", since)
    await load.more_tokens(4 * (K + 1))  # so that what is accepted from now on was drafted after it


_DISTURBANCES: dict[str, Callable[[Stack, Plan, Load], Awaitable[None]]] = {
    "kill": _kill,
    "hang": _hang,
    "delay": _go_wrong,
    "internal": _go_wrong,
    "wrong": _go_wrong,
}
FAULTS = ("delay", "internal", "wrong")
"""Kinds that a scripted drafter shows; the others happen to the real one."""
