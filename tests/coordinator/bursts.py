"""Short bursts of requests at a coordinator that has learned nothing yet, in virtual time: verifier and drafter share a GPU, on which prompts are
computed, too, so that a drafter that catches up keeps the verifier waiting. The coordinator's own work takes no time but for what a step in lockstep
takes."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from coordinator.engine import Engine
from coordinator.lane import Lane
from coordinator.loop import step
from specwire.config import CoordinatorConfig
from specwire.messages import DraftCost, DraftResult, DraftRound, DraftRowResult, GenerateRequest, RowStatus, VerifyCost, VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.bench.virtual_time import VirtualLoop
from tests.coordinator.virtual_lane import interpolate
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript, DraftSession, ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.verifier import ScriptedVerifier, VerifierScript

_INLINE = 32
"""Tokens of a sequence that a drafter computes with its drafts; with more to compute it catches up first."""
_SEQUENCES = (1, 4, 16, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Models:
    """What peers take on the GPU, in milliseconds, and say that they take.

    Args:
        verify: by tokens of a round; with prompts of so many, too.
        draft: of K drafts, by sequences.
        k: K_max.
        chunk_tokens, chunk_ms: of prompts that the drafter computes at once between rounds.
        hop_ms: a message to the drafter and its answer.
        lockstep_ms: what else a step in lockstep takes more, by rows.
        draft_factor: how much longer drafts take than the drafter says; a verifier's table is right.
        acceptance: of each position.
        open_ms: that a verifier or a drafter takes for each sequence that it is told of.
    """

    verify: Sequence[tuple[int, float]]
    draft: Sequence[tuple[int, float]]
    k: int
    chunk_tokens: int
    chunk_ms: float
    hop_ms: float
    lockstep_ms: Sequence[tuple[int, float]]
    draft_factor: float
    acceptance: float
    open_ms: float = 0.0
    has_fixed_draft: bool = False
    """A call costs the same for any number of drafts."""

    def draft_ms(self, num_sequences: int, k: int) -> float:
        return interpolate(self.draft, num_sequences) * (1.0 if self.has_fixed_draft else (1 + k) / (1 + self.k))


class Gpu:
    """One piece of work after the other."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def wait_s(self, work_ms: float) -> float:
        """Until work that comes now is done."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s) + work_ms / 1000
        return self._free_s - now_s


class CatchingUpDrafter(ScriptedDrafter):
    """Computes new tokens between its rounds, in chunks; what is asked about a sequence that is far behind is answered CATCHING_UP."""

    def __init__(self, script: DrafterScript, models: Models, gpu: Gpu) -> None:
        super().__init__(script)
        self._models, self._gpu = models, gpu
        self._missing: dict[tuple[int, int], int] = {}
        self._work: asyncio.Task[None] | None = None
        self.num_opens = 0

    def answer(self, session: DraftSession, message: DraftRound) -> DraftResult | None:
        for close in message.closes:
            self._missing.pop((close.slot, close.epoch), None)
        for open_ in message.opens:
            self._missing[open_.slot, open_.epoch] = len(open_.token_ids)
            self.num_opens += 1
        for commit in message.commits:
            key = commit.slot, commit.epoch
            self._missing[key] = self._missing.get(key, 0) + len(commit.token_ids)
        result = super().answer(session, message)
        if result is None:
            self._catch_up()
            return None
        rows = []
        for row in result.rows:
            key = row.slot, row.epoch
            if self._missing.get(key, 0) > _INLINE:
                row = DraftRowResult(RowStatus.CATCHING_UP, row.slot, row.epoch, row.base_len)
            else:
                self._missing.pop(key, None)
            rows.append(row)
        self._catch_up()
        return DraftResult(result.session, result.lane, result.round, rows)

    def _catch_up(self) -> None:
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._chunks())

    async def _chunks(self) -> None:
        while behind := [key for key, number in self._missing.items() if number > _INLINE]:
            budget = self._models.chunk_tokens
            await asyncio.sleep(self._gpu.wait_s(self._models.chunk_ms))
            for key in behind:
                taken = min(budget, self._missing.get(key, 0))
                budget -= taken
                if key in self._missing:
                    self._missing[key] -= taken


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of some bursts.

    Args:
        seconds: that all of them took.
        fallbacks: see `Counters`.
        num_probes, requested: see `PolicyCounters`.
        num_drafts: rows that had drafts.
        num_opens: sequences that the drafter was told of.
    """

    seconds: float
    fallbacks: dict[str, int]
    num_probes: int
    requested: list[int]
    num_drafts: int
    num_opens: int


def run_bursts(
    models: Models,
    num_sequences: int,
    k: int | None,
    *,
    num_bursts: int = 2,
    num_prompt_tokens: int = 128,
    num_tokens: int = 128,
    same_prompts: bool = False,
) -> Outcome:
    """Each burst begins when the one before it has ended.

    Args:
        k: of all steps; None: adaptive verification chooses.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_run(loop, models, num_sequences, k, num_bursts, num_prompt_tokens, num_tokens, same_prompts=same_prompts))
    finally:
        loop.close()


async def _run(
    loop: VirtualLoop, models: Models, number: int, k: int | None, num_bursts: int, num_prompt_tokens: int, num_tokens: int, *, same_prompts: bool
) -> Outcome:  # fmt: skip
    rng, gpu = random.Random(0), Gpu()

    def now_ns() -> int:
        return 10**12 + round(1e9 * loop.now_s)

    def score(is_right: bool, position: int) -> float:
        return 1 / (1 + math.exp(-math.log(models.acceptance / (1 - models.acceptance)) - 0.5 * rng.gauss(0.0, 1.0)))

    async def timed_step(lane: Lane) -> None:
        was_in_flight = bool(lane.in_flight)
        await step(lane)
        if lane.is_lockstep and was_in_flight and not lane.in_flight:
            loop.now_s += interpolate(models.lockstep_ms, number) / 1000

    num_verified = 0

    def verify_s(message: VerifyRound) -> float:
        nonlocal num_verified
        tokens, num_verified = verifier.num_tokens - num_verified, verifier.num_tokens
        return gpu.wait_s(interpolate(models.verify, tokens) + models.open_ms * len(message.opens)) if tokens else 0.0

    def draft_s(message: DraftRound) -> float:
        opens_s = gpu.wait_s(models.open_ms * len(message.opens)) if models.open_ms and message.opens else 0.0
        if not message.rows:
            return opens_s
        return (
            gpu.wait_s(models.draft_factor * models.draft_ms(len(message.rows), max(row.num_drafts for row in message.rows))) + models.hop_ms / 1000
        )

    length = num_prompt_tokens + num_tokens
    sizes = [size for size, _ in models.verify]
    network = LocalNetwork()
    verifier = ScriptedVerifier(VerifierScript(
        max_model_len=length + 64, max_num_seqs=number, max_num_batched_tokens=max(512, 2 * number * (models.k + 1)), num_blocks=number * length,
        prefix_caching=same_prompts, tells_times=True, delay_s=verify_s, verify_cost=VerifyCost(tuple(sizes), tuple(ms for _, ms in models.verify)),
    ))  # fmt: skip
    network.put("v:1", verifier)
    table = tuple(DraftCost(drafts, count, models.draft_ms(count, drafts)) for count in _SEQUENCES for drafts in range(1, models.k + 1))
    drafter = CatchingUpDrafter(DrafterScript(
        max_model_len=length + 64, max_num_seqs=number, acceptance=models.acceptance, draft_cost=table, tells_times=True, delay_s=draft_s,
        score=score,
        draft_chunk_ms=models.chunk_ms,
    ), models, gpu)  # fmt: skip
    network.put("d:1", drafter)
    config = CoordinatorConfig(
        verifiers=("v:1",), drafters=("d:1",), max_queue=4 * number, max_stream_backlog=1 << 20, verifier_timeout_s=0,
        speculative_config=SpeculativeConfig(
            num_speculative_tokens=models.k if k is None else k or 1, enable_adaptive_verification=k is None,
            num_speculative_tokens_per_batch_size=((1, number, 0),) if k == 0 else None,
        ),
    )  # fmt: skip
    engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
    with mock.patch("coordinator.engine.step", timed_step), mock.patch("time.monotonic_ns", now_ns), mock.patch("time.time_ns", now_ns):
        await engine.start()
        try:
            while not engine.ready.is_ready:
                await engine.readiness_changed()
            await asyncio.sleep(0.1)
            seconds = 0.0
            for burst in range(num_bursts):
                started_s = loop.now_s
                prompts = [
                    [3 + (burst * (not same_prompts) + 5 * index + 7 * place) % 900 for place in range(num_prompt_tokens)] for index in range(number)
                ]
                await _burst(engine, prompts, num_tokens)
                seconds += loop.now_s - started_s
                await asyncio.sleep(0.02)
            policy, counters = engine.lanes[0].policy, engine.counters
            chosen = None if policy is None else policy.policy.counters
            return Outcome(
                seconds, {cause: count for cause, count in counters.fallbacks.items() if count}, chosen.num_probes if chosen else 0,
                list(chosen.requested) if chosen else [], counters.num_drafts, drafter.num_opens,
            )  # fmt: skip
        finally:
            await engine.stop(0)


async def _burst(engine: Engine, prompts: list[list[int]], num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=1, ignore_eos=True)
    sinks = [CollectingSink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        engine.submit(GenerateRequest(prompt, params), sink)
    for sink in sinks:
        await sink.wait()
