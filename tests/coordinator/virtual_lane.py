"""A coordinator's lane in virtual time: scripted peers whose work takes what tables say, and time between a step's commit and the next plan that none
of its parts shows. The coordinator's own work takes no time but for that."""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from coordinator.adaptive import LanePolicy
from coordinator.engine import Engine
from coordinator.lane import Lane
from coordinator.loop import step
from specwire.config import CoordinatorConfig
from specwire.messages import DraftCost, DraftRound, GenerateRequest, VerifyCost, VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.bench.virtual_time import VirtualLoop
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.verifier import ScriptedVerifier, VerifierScript

K = 7
ACCEPTANCE = 0.8
_SIGMA = 0.5
_MAX_LEN = 16_000
Overhead = Callable[[int, int], float]
"""Milliseconds between a step in lockstep and the next one, by its rows and tokens."""


def interpolate(points: Sequence[tuple[int, float]], size: int) -> float:
    """Milliseconds at a size; the last segment goes on."""
    (low, low_ms), (high, high_ms) = points[-2:]
    for before, after in itertools.pairwise(points):
        if size <= after[0]:
            (low, low_ms), (high, high_ms) = before, after
            break
    return low_ms + (high_ms - low_ms) * max(0, size - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Costs:
    """What peers take, and say that they take.

    Args:
        verify: milliseconds by tokens of a round; draft: by sequences x (K + 1).
        overhead: see above.
    """

    verify: Sequence[tuple[int, float]]
    draft: Sequence[tuple[int, float]]
    overhead: Overhead

    def verify_table(self) -> VerifyCost:
        return VerifyCost(tuple(size for size, _ in self.verify), tuple(ms for _, ms in self.verify))

    def draft_table(self) -> tuple[DraftCost, ...]:
        numbers = (1, 4, 16, 64, 128, 256)
        return tuple(DraftCost(k, number, interpolate(self.draft, number * (k + 1))) for number in numbers for k in (1, 3, 7))


@dataclass(slots=True)
class VirtualLane:
    """One run.

    Args:
        k: of all steps; None: adaptive verification chooses.
    """

    costs: Costs
    num_sequences: int
    k: int | None

    def throughput(self, num_settle: int, num_measured: int) -> tuple[float, LanePolicy | None]:
        """Tokens a millisecond of all sequences, while each gets so many tokens on average, behind others that are not measured; and the policy."""
        loop = VirtualLoop()  # not asyncio.run, which would wait for threads at the end
        try:
            return loop.run_until_complete(self._run(num_settle, num_measured))
        finally:
            loop.close()

    async def _run(self, num_settle: int, num_measured: int) -> tuple[float, LanePolicy | None]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), f"{loop} has no virtual time"
        rng = random.Random(0)

        def now_ns() -> int:
            return 10**12 + round(1e9 * loop.now_s)

        def score(is_right: bool, position: int) -> float:
            return 1 / (1 + math.exp(-math.log(ACCEPTANCE / (1 - ACCEPTANCE)) - _SIGMA * rng.gauss(0.0, 1.0)))

        async def timed_step(lane: Lane) -> None:
            was_in_flight = bool(lane.in_flight)
            await step(lane)
            if lane.is_lockstep and was_in_flight and not lane.in_flight:
                last = lane.next_round - 1
                tokens = sizes.pop(last, 0)
                loop.now_s += self.costs.overhead(self.num_sequences, tokens) / 1000

        sizes: dict[int, int] = {}

        def verify_s(message: VerifyRound) -> float:
            tokens = sum(row.token_budget or 1 + len(row.draft_tokens) for row in message.rows)
            sizes[message.round] = tokens
            return interpolate(self.costs.verify, tokens) / 1000 if tokens else 0.0

        def draft_s(message: DraftRound) -> float:
            return interpolate(self.costs.draft, sum(row.num_drafts + 1 for row in message.rows)) / 1000 if message.rows else 0.0

        number = self.num_sequences
        network = LocalNetwork()
        network.put("v:1", ScriptedVerifier(VerifierScript(
            max_model_len=_MAX_LEN, max_num_seqs=number, max_num_batched_tokens=max(64, 2 * number * (K + 1)), num_blocks=number * _MAX_LEN,
            prefix_caching=False, verify_cost=self.costs.verify_table(), tells_times=True, delay_s=verify_s,
        )))  # fmt: skip
        network.put("d:1", ScriptedDrafter(DrafterScript(
            max_model_len=_MAX_LEN, max_num_seqs=number, acceptance=ACCEPTANCE, draft_cost=self.costs.draft_table(), tells_times=True,
            delay_s=draft_s, score=score,
        )))  # fmt: skip
        config = CoordinatorConfig(
            verifiers=("v:1",), drafters=("d:1",), min_draft_wait_ms=10_000, max_queue=number, max_stream_backlog=1 << 20, verifier_timeout_s=0,
            speculative_config=SpeculativeConfig(
                num_speculative_tokens=K if self.k is None else self.k or 1, enable_adaptive_verification=self.k is None,
                num_speculative_tokens_per_batch_size=((1, number, 0),) if self.k == 0 else None,
            ),
        )  # fmt: skip
        engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
        with mock.patch("coordinator.engine.step", timed_step), mock.patch("time.monotonic_ns", now_ns), mock.patch("time.time_ns", now_ns):
            await engine.start()
            try:
                return await self._measure(engine, loop, num_settle, num_measured)
            finally:
                await engine.stop(0)

    async def _measure(self, engine: Engine, loop: VirtualLoop, num_settle: int, num_measured: int) -> tuple[float, LanePolicy | None]:
        while not engine.ready.is_ready:
            await engine.readiness_changed()
        progress, num_tokens = asyncio.Event(), 0

        class Sink(CollectingSink):
            def delta(self, choice: int, token_ids: Any, origins: bytes) -> None:
                nonlocal num_tokens
                num_tokens += len(token_ids)
                progress.set()

        params = SamplingParams(max_tokens=_MAX_LEN - 100, temperature=1.0, seed=1, ignore_eos=True)
        handles = [engine.submit(GenerateRequest([5, 6, 7, 8 + index % 900, 9], params), Sink(1)) for index in range(self.num_sequences)]

        async def until(number: int) -> None:
            while num_tokens < number * self.num_sequences:
                progress.clear()
                await progress.wait()

        await until(num_settle)
        started_s, before = loop.now_s, num_tokens
        await until(num_settle + num_measured)
        rate = (num_tokens - before) / (1000 * (loop.now_s - started_s))
        policy = engine.lanes[0].policy
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(0.1)
        return rate, policy
