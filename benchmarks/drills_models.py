"""The only verifier restarted, the coordinator lost, drafters swapped for another method or checkpoint: under streams of a real tiny model."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.drills_load import Case, Load
from benchmarks.drills_processes import Service
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.engine.tiny_models import save_tiny_model
from tests.integration.noisy_model import save_noisy
from tests.integration.reference import OneTokenLoop
from tests.integration.tiny import drafter_config, verifier_config

K = 4
ERROR = "UnavailableError"
"""What clients get of a coordinator that is gone."""
FREE_S = 5.0
"""Within which a verifier must be free for another coordinator."""
_LETTERS, _SHARPNESS = list(range(97, 109)), 6.0
_MAX_RETRIES = 5  # long enough for a coordinator that starts on a busy machine


class Models:
    """A tiny target, draft models that are right now and then, and what the target says.

    Args:
        folder: for their files.
        num_cases: different requests; answer_len: tokens of each answer.
    """

    def __init__(self, folder: Path, num_cases: int = 16, answer_len: int = 200) -> None:
        self.target = folder / "target"
        self.drafts = folder / "draft-close", folder / "draft-far"
        save_tiny_model(self.target)
        _narrow(self.target / "model.safetensors")
        for path, noise in zip(self.drafts, (0.05, 0.2), strict=True):
            save_noisy(self.target, path, noise)
        reference = OneTokenLoop(self.target, 256, num_threads=1)
        self._cases = []
        for index in range(num_cases):
            prompt = [32 + (index * 13 + 7 * position) % 90 for position in range(4 + index)]
            params = SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=answer_len, ignore_eos=True)
            token_ids = reference.generate(prompt, params).token_ids
            self._cases.append(Case(prompt, params, functools.partial(list, token_ids)))

    def make_case(self, stream: int, number: int) -> Case:
        """Every stream goes through all of them, each from another one on."""
        return self._cases[(stream + number) % len(self._cases)]

    def drafter(self, method: str, address: str) -> DrafterConfig:
        """ngram, suffix, or close or far: two checkpoints of the draft model."""
        if method in ("ngram", "suffix"):
            return DrafterConfig(listen=(address,), speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=K))
        return drafter_config(self.drafts[method == "far"], num_speculative_tokens=K, listen=(address,))


@dataclass(frozen=True, slots=True)
class Stack:
    """One verifier, drafters and a coordinator, each a process, with a client."""

    folder: Path
    verifier: Service
    drafters: list[Service]
    coordinator: Service
    client: AsyncClient
    num_streams: int
    restart_s: float


def coordinator_config(folder: Path, name: str, num_drafters: int = 1) -> CoordinatorConfig:
    """A coordinator of that name and address; no step goes on without its drafts however busy the machine is."""
    return CoordinatorConfig(
        listen=(f"unix:{folder}/{name}",), coordinator_id=name, verifiers=(f"unix:{folder}/verifier",), min_draft_wait_ms=1000.0,
        drafters=tuple(f"unix:{folder}/drafter-{index}" for index in range(num_drafters)),
        speculative_config=SpeculativeConfig(num_speculative_tokens=K),
    )  # fmt: skip


@asynccontextmanager
async def start_stack(
    models: Models, folder: Path, *, num_streams: int = 16, num_drafters: int = 1, max_num_seqs: int = 16, restart_s: float = 0.5
) -> AsyncIterator[Stack]:
    """Starts everything, on sockets in `folder`, with prompt lookup."""
    address = f"unix:{folder}/verifier"
    config = verifier_config(models.target, num_speculative_tokens=K, listen=(address,), max_num_seqs=max_num_seqs, num_kv_blocks=16 * max_num_seqs)
    verifier = Service("verifier", address, config, restart_s)
    addresses = [f"unix:{folder}/drafter-{index}" for index in range(num_drafters)]
    drafters = [Service(f"drafter-{index}", address, models.drafter("ngram", address), restart_s) for index, address in enumerate(addresses)]
    coordinator = Service("coordinator", f"unix:{folder}/coordinator", coordinator_config(folder, "coordinator", num_drafters), restart_s)
    async with AsyncExitStack() as resources:
        for service in (verifier, *drafters, coordinator):
            await service.start()
            resources.push_async_callback(service.stop)
        await coordinator.ready()
        async with AsyncClient(coordinator.address, max_retries=_MAX_RETRIES) as client:
            await client.wait_ready()
            yield Stack(folder, verifier, drafters, coordinator, client, num_streams, restart_s)


@asynccontextmanager
async def running(stack: Stack, models: Models) -> AsyncIterator[Load]:
    """Streams that all run and get drafts that are accepted; left at the end."""
    load = Load(stack.client, models.make_case, stack.num_streams)
    load.start()
    try:
        await load.more_tokens(5)
        await load.more_accepted()
        yield load
    finally:
        await load.stop()


async def restart_verifier(stack: Stack, models: Models, num_restarts: int) -> tuple[dict[str, Any], list[str]]:
    """Kills the only verifier and starts it again: figures and problems."""
    restarts_s, pauses_s = [], []
    async with running(stack, models) as load:
        for _ in range(num_restarts):
            started_s = time.monotonic()
            await stack.verifier.kill()
            await stack.verifier.restart()
            restarts_s.append(time.monotonic() - started_s)
            await load.more_tokens(20)
            pauses_s.append(load.longest_gap_s(started_s, time.monotonic()))
    figures = {"restarts": num_restarts, "restart_s": _rounded(restarts_s), "longest_gap_s": _rounded(pauses_s), **load.figures()}
    return figures, load.find_problems()


async def restart_coordinator(stack: Stack, models: Models, num_restarts: int) -> tuple[dict[str, Any], list[str]]:
    """Kills the coordinator and starts it again, with more streams than the verifier takes at once: some have no token yet."""
    failed, kept, first_error_s, back_s, problems = 0, 0, [], [], []
    async with running(stack, models) as load:
        for _ in range(num_restarts):
            await load.more_tokens(10)
            num_errors = len(load.error_s)
            live = [answer for answer in load.answers if not answer.is_whole and not answer.error]
            started_s = time.monotonic()
            await stack.coordinator.kill()
            await stack.coordinator.restart()
            await load.more_tokens(10)
            back_s.append(time.monotonic() - started_s)
            first_error_s.append(load.error_s[num_errors] - started_s)
            failed += sum(bool(answer.error) for answer in live)
            kept += sum(not answer.error for answer in live)
            problems += [f"a request failed that had no token: {answer.error_text}" for answer in live if answer.error and not answer.token_ids]
    figures = {
        "restarts": num_restarts,
        "streams_that_failed": failed,
        "requests_without_a_token_that_went_on": kept,
        "retries": stack.client.num_retries,
        "first_error_s": _rounded(first_error_s),
        "every_stream_has_tokens_again_s": _rounded(back_s),
        **load.figures(),
    }
    if not failed or not kept:
        problems.append(f"{failed} streams failed and {kept} requests went on; both must have been there")
    return figures, problems + load.find_problems(allowed_error=ERROR)


async def hand_on_verifier(stack: Stack, models: Models, num_times: int) -> tuple[dict[str, Any], list[str]]:
    """Kills the coordinator while another one, of another id, waits for its verifier; then the same the other way round."""
    names = "coordinator", "standby"
    standby = Service("standby", f"unix:{stack.folder}/standby", coordinator_config(stack.folder, "standby", len(stack.drafters)), stack.restart_s)
    services, free_s, problems = [stack.coordinator, standby], [], []
    await standby.start()
    try:
        for number in range(num_times):
            holder, other = services[number % 2], services[1 - number % 2]
            await other.wait_for(f"coordinator '{names[number % 2]}' holds this verifier")
            async with AsyncClient(holder.address, max_retries=0) as client:
                load = Load(client, models.make_case, stack.num_streams)
                load.start()
                await load.more_tokens(5)
                started_s = time.monotonic()
                await holder.kill()
                await other.serving()
                free_s.append(time.monotonic() - started_s)
                await load.stop()
            problems += load.find_problems(allowed_error=ERROR)
            case = models.make_case(number, number)
            async with AsyncClient(other.address) as client:
                if (await client.generate(case.prompt, case.params)).token_ids != case.expected():
                    problems.append("the coordinator that took over gives other tokens than the target alone")
            holder.lines.clear()
            await asyncio.sleep(stack.restart_s)
            await holder.start()
    finally:
        await standby.stop()
    return {"times": num_times, "free_after_s": _rounded(free_s), "allowed_s": FREE_S, "is_in_time": max(free_s) <= FREE_S}, problems


async def swap_drafters(stack: Stack, models: Models, methods: Sequence[str], num_tokens: int = 150) -> tuple[dict[str, Any], list[str]]:
    """Replaces the drafters one by one by those of the next method, under streams; what each method's drafts are worth while all have it, for
    num_tokens of every stream."""
    problems: list[str] = []
    phases: list[dict[str, Any]] = []
    async with running(stack, models) as load:
        phases.append(await _watch(stack, load, "ngram", num_tokens))
        for method in methods:
            started_s, num_accepted = time.monotonic(), load.num_accepted
            for drafter in stack.drafters:
                since = len(stack.coordinator.lines)
                ended = await drafter.replace(models.drafter(method, drafter.address))
                if ended != "status 0":
                    problems.append(f"{drafter.name} ended with {ended} after SIGTERM")
                await stack.coordinator.wait_for(f"drafter {drafter.address} is there", since)
            swap = {
                "swap_s": round(time.monotonic() - started_s, 2),
                "swap_longest_gap_ms": round(1000 * load.longest_gap_s(started_s, time.monotonic()), 1),
                "swap_accepted_tokens": load.num_accepted - num_accepted,
            }
            phases.append({**swap, **await _watch(stack, load, method, num_tokens)})
    return {"phases": phases, **load.figures()}, problems + load.find_problems()


async def _watch(stack: Stack, load: Load, method: str, num_tokens: int) -> dict[str, Any]:
    """A while of all drafters with the same method."""
    await load.more_tokens(4 * (K + 1))  # what was drafted before
    before = await stack.client.get_status()
    await load.more_tokens(num_tokens)
    await load.more_accepted()
    after = await stack.client.get_status()
    described = {(drafter.method, drafter.model_id) for drafter in after.drafters}
    assert len(described) == 1, f"all drafters should have {method}, but they have {described}"
    num_drafts, num_accepted = (
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )
    [(name, model)] = described
    return {
        "method": name,
        "model": Path(model).name,
        "draft_tokens": num_drafts,
        "accepted_tokens": num_accepted,
        "acceptance": round(num_accepted / num_drafts, 3),
    }


def _narrow(weights: Path) -> None:
    """A random model says anything at all, where prompt lookup finds nothing: with this head it nearly always says one of a few letters."""
    tensors = load_file(weights)
    head = torch.zeros_like(tensors["lm_head.weight"])
    head[_LETTERS] = _SHARPNESS * tensors["lm_head.weight"][_LETTERS]
    save_file(tensors | {"lm_head.weight": head}, weights, metadata={"format": "pt"})


def _rounded(seconds: list[float]) -> list[float]:
    return [round(value, 2) for value in seconds]
