"""Services that stop on purpose say so first: what they owe is answered, and their sequences go on elsewhere without a setback."""

import asyncio

import pytest

from coordinator.server import CoordinatorServer
from specwire.client.aio import AsyncClient
from specwire.config import CoordinatorConfig
from specwire.errors import UnavailableError
from specwire.rpc import is_serving, open_channel
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.waiting import until

PROMPT = [5, 6, 7, 8, 9]
VERIFIER = VerifierScript(delay_s=0.002)


def submit(cluster: Cluster, num_requests: int = 6, max_tokens: int = 200) -> list[Running]:
    return [cluster.submit(PROMPT, seed=seed, max_tokens=max_tokens) for seed in range(num_requests)]


async def some_tokens(running: list[Running]) -> None:
    await running[0].cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 5 for request in running))


@pytest.mark.parametrize("num_drafters", [0, 1])
@pytest.mark.parametrize("w", [1, 2])
async def test_a_verifier_that_stops_hands_its_sequences_over(w: int, num_drafters: int) -> None:
    drafters = [DrafterScript(acceptance=0.6)] * num_drafters
    async with Cluster([VERIFIER] * 2, drafters, max_outstanding_rounds=w, min_draft_wait_ms=1000) as cluster:
        running = submit(await cluster.all_there())
        await some_tokens(running)
        lane, other = cluster.engine.lanes
        num_running = len(lane.running)
        cluster.network.drain("v0:1")
        await cluster.until(lambda: lane.is_draining)
        assert not lane.is_ready
        assert lane.reason == "verifier v0:1 is about to stop"
        await cluster.until(lambda: not lane.is_connected)
        # Everything that it owed was committed, then it was let go.
        assert not lane.in_flight
        assert cluster.verifiers[0].session is not None
        assert cluster.verifiers[0].session.num_unanswered == 0
        assert cluster.network.num_streams("v0:1") == 0
        assert cluster.verifiers[0].num_blocks_used == 0
        for request in running:
            await request.check()
        counters = cluster.engine.counters
        assert 0 < counters.num_handovers <= num_running
        assert counters.num_verifier_losses == counters.num_dropped_rows == counters.num_stale_rows == 0
        assert len(other.running) == 0


async def test_an_idle_verifier_that_stops_is_let_go_at_once() -> None:
    async with Cluster([VERIFIER] * 2) as cluster:
        await cluster.all_there()
        cluster.network.drain("v0:1")
        await until(lambda: cluster.network.num_streams("v0:1") == 0)
        assert cluster.engine.ready.is_ready
        running = submit(cluster, 2)
        for request in running:
            await request.check()
        assert cluster.verifiers[0].num_rows == 0


async def test_without_another_verifier_sequences_wait_for_one() -> None:
    async with Cluster([VERIFIER]) as cluster:
        running = submit(await cluster.ready(), 3)
        await some_tokens(running)
        cluster.network.drain("v0:1")
        await until(lambda: cluster.network.num_streams("v0:1") == 0)
        assert not cluster.engine.ready.is_ready
        with pytest.raises(UnavailableError, match="lane 0: verifier v0:1"):
            cluster.submit(PROMPT, seed=1, max_tokens=3)
        await cluster.restart_verifier(0)
        for request in running:
            await request.check()
        assert cluster.engine.counters.num_handovers == 3


async def test_a_verifier_that_is_killed_while_it_drains() -> None:
    async with Cluster([VerifierScript(delay_s=0.05)] * 2) as cluster:
        running = submit(await cluster.all_there(), 4, max_tokens=20)
        await some_tokens(running)
        cluster.network.drain("v0:1")
        await cluster.until(lambda: cluster.engine.lanes[0].is_draining)
        await cluster.kill_verifier(0)
        for request in running:
            await request.check()
        counters = cluster.engine.counters
        assert (counters.num_verifier_losses, counters.num_handovers) in ((1, 0), (0, 2))


async def test_a_drafter_that_stops_hands_its_sequences_over() -> None:
    async with Cluster([VERIFIER] * 2, [DrafterScript(acceptance=0.8)] * 2, min_draft_wait_ms=1000) as cluster:
        running = submit(await cluster.all_there())
        await some_tokens(running)
        num_open = cluster.drafters[0].num_open
        assert num_open > 0
        cluster.network.drain("d0:1")
        await cluster.until(lambda: cluster.network.num_streams("d0:1") == 0)
        assert cluster.drafters[0].num_open == 0
        await cluster.until(lambda: cluster.drafters[1].num_open == sum(not request.sink.ended for request in running))
        for request in running:
            await request.check()
        counters = cluster.engine.counters
        assert counters.num_drafter_handovers == num_open
        assert counters.num_drafter_losses == counters.num_drafter_timeouts == counters.fallbacks["drafter_lost"] == 0


async def test_what_a_stopping_drafter_still_owes_is_used() -> None:
    """It says that it stops while a step waits for its answer."""
    async with Cluster([VERIFIER], [DrafterScript()], min_draft_wait_ms=5000) as cluster:
        await cluster.all_there()
        cluster.drafters[0].script.delay_s = 0.05
        [request] = submit(cluster, 1, max_tokens=40)
        link = cluster.engine.lanes[0].links[0]
        await until(lambda: bool(link.asked.number))
        num_accepted = cluster.engine.counters.num_accepted_tokens
        cluster.network.drain("d0:1")
        await cluster.until(lambda: cluster.engine.counters.num_accepted_tokens > num_accepted)
        await until(lambda: not link.is_connected)
        await request.check()
        assert cluster.engine.counters.num_drafter_handovers == 1
        assert cluster.engine.counters.fallbacks["no_drafter"] > 0


async def test_a_coordinator_that_stops(socket_dir) -> None:
    """What runs goes on to its end; what is new is told to go elsewhere, also within a session."""
    async with Cluster([VERIFIER]) as cluster:
        await cluster.ready()
        config = CoordinatorConfig(listen=(f"unix:{socket_dir}/c",), verifiers=("v0:1",))
        server = CoordinatorServer(cluster.engine, config)
        await server.start()
        following = asyncio.create_task(server.follow_readiness())
        async with AsyncClient(server.bound_addresses[0]) as client, open_channel(server.bound_addresses[0]) as channel:
            await client.wait_ready()
            stream = client.stream(PROMPT, max_tokens=150, seed=1)
            token_ids = list((await anext(stream)).token_ids)
            stopping = asyncio.gather(cluster.engine.stop(10.0), server.stop(11.0))
            with pytest.raises(UnavailableError):
                await client.generate(PROMPT, max_tokens=3)
            assert not await is_serving(channel)
            async for event in stream:
                token_ids += event.token_ids
            assert token_ids == cluster.verifiers[0].target.generate(PROMPT, 150, 1)
            await stopping
        following.cancel()
