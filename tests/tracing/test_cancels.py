"""Requests that end early, in every phase, with tracing on: nothing stays anywhere, and every span has an end."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire import AsyncClient
from specwire.config import CoordinatorConfig
from specwire.messages import DraftRound, GenerateRequest, VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.scripted.cluster import Cluster
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.verifier import ScriptedVerifier, VerifierScript
from tests.tracing.collector import Seen, check_declared, check_tree, collecting
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient")
NUM_REQUESTS = 500
PHASES = ("queued", "prefill", "first", "middle", "drafting", "verifying", "last", "deadline")
MAX_TOKENS = 24
TIMEOUTS_MS = (1, 5, 20, 100, 400, 1500)
"""Half of them shorter than the queue on any machine."""
ENDED_S = 60.0
"""A second where nothing else runs."""


@dataclass
class Victim:
    """A request that is to be cancelled in a phase."""

    phase: str
    sink: CollectingSink
    cancel: Callable[[], None]
    has_fired: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.sink.choices[0].token_ids)

    def fire(self) -> None:
        """Cancels in the next turn of the loop, as a client's message does."""
        if not self.has_fired:
            self.has_fired = True
            asyncio.get_running_loop().call_soon(self.cancel)


@dataclass
class Hunt:
    """Fires at victims as messages show that they are in their phase; keeps the contexts that were sent."""

    victims: dict[str, Victim] = field(default_factory=dict)
    proposals: list[str] = field(default_factory=list)
    verifications: list[str] = field(default_factory=list)

    def on_draft_round(self, message: DraftRound) -> float:
        self.proposals += message.traceparents
        if message.rows:
            self._fire("drafting", lambda victim: victim.num_tokens >= 1)
        return 0.0

    def on_verify_round(self, message: VerifyRound) -> float:
        self.verifications += message.traceparents
        opened = {open_.request_id for open_ in message.opens}
        self._fire("prefill", lambda victim: False, opened)
        self._fire("verifying", lambda victim: victim.num_tokens >= 1)
        self._fire("last", lambda victim: victim.num_tokens >= MAX_TOKENS - 2)
        return 0.0

    def on_tokens(self) -> None:
        self._fire("first", lambda victim: victim.num_tokens >= 1)
        self._fire("middle", lambda victim: victim.num_tokens >= MAX_TOKENS // 2)

    def _fire(self, phase: str, condition: Callable[[Victim], bool], names: set[str] | None = None) -> None:
        for name, victim in self.victims.items():
            if victim.phase == phase and not victim.has_fired and (condition(victim) or (names is not None and name in names)):
                victim.fire()


async def test_500_cancels_in_every_phase() -> None:
    source, hunt = random.Random(3), Hunt()
    verifier = VerifierScript(max_num_seqs=16, max_num_batched_tokens=96, delay_s=hunt.on_verify_round, num_blocks=400)
    drafter = DrafterScript(acceptance=0.5, delay_s=hunt.on_draft_round)
    with collecting() as collector:
        async with Cluster([verifier], [drafter], k=3, min_draft_wait_ms=10_000, trace_endpoint=collector.address) as cluster:
            await cluster.all_there()
            spans = cluster.engine._admission.telemetry.spans
            assert spans is not None
            for index in range(NUM_REQUESTS):
                phase = PHASES[index % len(PHASES)]
                sink = CollectingSink(on_tokens=hunt.on_tokens)
                message = GenerateRequest(
                    [source.randrange(3, 900) for _ in range(source.choice((4, 30, 200)))],
                    SamplingParams(seed=index, max_tokens=MAX_TOKENS, ignore_eos=True), f"{phase} {index}",
                    timeout_ms=source.choice(TIMEOUTS_MS) if phase == "deadline" else None,
                )  # fmt: skip
                victim = Victim(phase, sink, cluster.engine.submit(message, sink).cancel)
                hunt.victims[message.request_id] = victim
                if phase == "queued":
                    victim.fire()
                if index % 50 == 49:
                    await asyncio.sleep(0)
            for victim in hunt.victims.values():
                await victim.sink.wait()
            async with asyncio.timeout(ENDED_S):
                await cluster.until(lambda: not cluster.verifiers[0].num_blocks_used and not cluster.drafters[0].num_open)
            assert not cluster.engine._requests
            assert not spans._placed
            cluster.engine.check_integrity()
            num_dropped = spans.tracer.num_dropped
    assert num_dropped == 0
    seen = collector.spans
    check_declared(seen)
    check_ends(seen, hunt)


def check_ends(seen: list[Seen], hunt: Hunt) -> None:
    """One trace a request, whose spans have ended as the request did; none that a service was told of is missing."""
    traces: dict[str, list[Seen]] = {}
    for span in seen:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == NUM_REQUESTS
    ends: Counter[tuple[str, str]] = Counter()
    open_spans: Counter[str] = Counter()
    for trace in traces.values():
        check_tree(trace)
        [root] = [span for span in trace if span.name == "generate"]
        phase = root.attributes["specwire.request_id"].split()[0]
        ends[phase, "OK" if root.is_ok else root.message.partition(":")[0]] += 1
        open_spans.update(f"{phase} {span.name}" for span in trace if not span.is_ok)
        assert root.is_ok == (root.attributes["specwire.finish_reasons"] == ["length"])
        assert root.is_ok is False or all(span.is_ok for span in trace)
    for phase in PHASES:
        # Some requests end by themselves before their phase is seen, or at the same time.
        code = "DEADLINE_EXCEEDED" if phase == "deadline" else "CANCELLED"
        assert ends[phase, code] >= (20 if phase != "last" else 5), ends
    assert set(ends) <= {(phase, code) for phase in PHASES for code in ("OK", "CANCELLED", "DEADLINE_EXCEEDED")}
    # The phases were really met.
    for name in ("queued queue", "prefill prefill", "drafting propose", "verifying verify", "last step"):
        assert open_spans[name] > 0, open_spans
    for name, sent in (("propose", hunt.proposals), ("verify", hunt.verifications)):
        emitted = {f"00-{span.trace_id}-{span.span_id}-01" for span in seen if span.name == name}
        assert emitted == set(sent), f"{len(set(sent) - emitted)} {name} spans have no end"


async def test_disconnects(socket_dir: Path) -> None:
    network = LocalNetwork()
    verifier, drafter = ScriptedVerifier(VerifierScript(delay_s=0.002)), ScriptedDrafter(DrafterScript(acceptance=0.5))
    network.put("v:1", verifier)
    network.put("d:1", drafter)
    with collecting() as collector:
        config = CoordinatorConfig(
            listen=(f"unix:{socket_dir}/coordinator",), verifiers=("v:1",), drafters=("d:1",), trace_endpoint=collector.address,
            speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        )  # fmt: skip
        engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
        server = CoordinatorServer(engine, config)
        await server.start()
        await engine.start()
        following = asyncio.create_task(server.follow_readiness())
        try:
            for round_ in range(3):
                async with AsyncClient(config.listen[0]) as client:
                    await client.wait_ready(20)
                    tasks = [asyncio.create_task(_read(client, f"{round_} {index}", index)) for index in range(20)]
                    await until(lambda: len(engine._requests) == 20)
                    await until(lambda: any(lane.running for lane in engine.lanes))
                await asyncio.gather(*tasks, return_exceptions=True)
                async with asyncio.timeout(ENDED_S):
                    await until(lambda: not engine._requests and not verifier.num_blocks_used and not drafter.num_open)
        finally:
            following.cancel()
            await asyncio.gather(engine.stop(0), server.stop(0))
    traces: dict[str, list[Seen]] = {}
    check_declared(collector.spans)
    for span in collector.spans:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == 60
    for trace in traces.values():
        check_tree(trace)
        [root] = [span for span in trace if span.name == "generate"]
        assert root.message == "CANCELLED: the request was cancelled"


async def _read(client: AsyncClient, request_id: str, seed: int) -> Any:
    return await client.generate([5, 6, 7], seed=seed, max_tokens=400, ignore_eos=True, request_id=request_id)
