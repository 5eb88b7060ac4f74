"""Whatever goes wrong around traced requests, their traces are whole."""

import asyncio
import random

import pytest

from specwire.messages import DraftRound, GenerateRequest, VerifyRound
from specwire.sampling_params import SamplingParams
from tests.scripted.cluster import Cluster
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import GARBAGE, DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.tracing.collector import Seen, check_declared, check_tree, collecting

pytestmark = pytest.mark.usefixtures("patient")
NUM_REQUESTS = 60
NUM_FAULTS = 25


@pytest.mark.parametrize("seed", range(3))
async def test_random_faults(seed: int) -> None:
    """Verifiers and drafters die and come back, rows are lost, blocks run out, drafts are late or garbage, clients leave."""
    source = random.Random(seed)
    sent: dict[str, set[str]] = {"propose": set(), "verify": set()}

    def on_verify(message: VerifyRound) -> float:
        sent["verify"].update(message.traceparents)
        return source.choice((0.0, 0.0, 0.001))

    def on_draft(message: DraftRound) -> float:
        sent["propose"].update(message.traceparents)
        return source.choice((0.0, 0.0, 0.0, 0.004))

    verifiers = [
        VerifierScript(instance_id=f"v{index}", delay_s=on_verify, num_usable_blocks=60, lose_row=lambda *_: source.random() < 0.002)
        for index in range(2)
    ]
    drafters = [DrafterScript(instance_id=f"d{index}", delay_s=on_draft, acceptance=0.6) for index in range(2)]
    drafters[1].garbage = GARBAGE
    with collecting() as collector:
        async with Cluster(verifiers, drafters, k=4, min_draft_wait_ms=2, trace_endpoint=collector.address, trace_max_steps=12) as cluster:
            await cluster.all_there()
            sinks: list[CollectingSink] = []
            for index in range(NUM_REQUESTS):
                params = SamplingParams(n=source.choice((1, 1, 1, 2, 3)), seed=index, max_tokens=source.randrange(1, 40))
                sink = CollectingSink(params.n, on_tokens=cluster.advance)
                prompt = [source.randrange(3, 900) for _ in range(source.choice((3, 20, 90)))]
                timeout_ms = source.choice((None, None, None, source.randrange(1, 400)))
                handle = cluster.engine.submit(GenerateRequest(prompt, params, f"r{index}", timeout_ms=timeout_ms), sink)
                if source.random() < 0.3:
                    asyncio.get_running_loop().call_later(source.random() * 0.3, handle.cancel)
                sinks.append(sink)
            faults = asyncio.create_task(_make_faults(cluster, source))
            for sink in sinks:
                await sink.wait()
            faults.cancel()
            spans = cluster.engine._admission.telemetry.spans
            assert spans is not None
            assert not spans._placed
    seen = collector.spans
    check_declared(seen)
    traces: dict[str, list[Seen]] = {}
    for span in seen:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == NUM_REQUESTS
    for trace in traces.values():
        check_tree(trace)
        assert sum(span.name == "step" for span in trace) <= 12
    for name, contexts in sent.items():
        assert contexts
        assert contexts <= {f"00-{span.trace_id}-{span.span_id}-01" for span in seen if span.name == name}
    assert any(span.name == "step" and "specwire.discarded" in span.attributes for span in seen)


async def _make_faults(cluster: Cluster, source: random.Random) -> None:
    for _ in range(NUM_FAULTS):
        index, num_steps = source.randrange(2), cluster.num_steps + source.randrange(2, 12)
        await cluster.until(lambda: cluster.num_steps >= num_steps)  # noqa: B023 - awaited in this turn
        if source.random() < 0.5:
            await cluster.restart_verifier(index)
        else:
            await cluster.restart_drafter(index)
