"""Peers that hang, answer wrongly or never come back."""

import asyncio
import logging
import socket

import grpc
import pytest

from coordinator.engine import Engine
from coordinator.replies import take_rows
from specwire.config import CoordinatorConfig
from specwire.errors import InternalError
from specwire.messages import DraftCost, DraftRowResult, FinishReason, RowStatus, VerifyOpen
from tests.scripted.cluster import Cluster, GrpcNetwork, InProcessNetwork
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import ScriptedVerifier, VerifierScript

PROMPT = [5, 6, 7, 8, 9]


def goes_bad(open_: VerifyOpen, index: int) -> bool:
    return open_.noise_key == 13 and index == 20


@pytest.mark.parametrize("grpc_", [False, True])
@pytest.mark.parametrize("num_drafters", [0, 1])
async def test_nan_ends_only_its_own_request(num_drafters: int, grpc_: bool) -> None:
    drafters = [DrafterScript(acceptance=0.7)] * num_drafters
    async with Cluster([VerifierScript(is_bad=goes_bad)], drafters, grpc=grpc_, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        running = [cluster.submit(PROMPT, seed=seed, max_tokens=40) for seed in (12, 13, 14)]
        bad = (await running[1].sink.wait()).choices[0]
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.error is not None
        assert bad.error.code == grpc.StatusCode.INTERNAL.value[0]
        assert "not finite" in bad.error.message
        assert bad.usage is not None
        assert bad.usage.num_generated_tokens == len(bad.token_ids) <= 15
        assert bad.token_ids == running[1].expected()[: len(bad.token_ids)]
        await running[0].check()
        await running[2].check()
        await cluster.until(lambda: cluster.verifiers[0].num_blocks_used == 0)
        assert cluster.engine.counters.num_bad_rows >= 1


async def test_no_verifier_comes_back() -> None:
    async with Cluster(verifier_wait_s=0.2) as cluster:
        await cluster.ready()
        running = [cluster.submit(PROMPT, seed=1, max_tokens=400), cluster.submit(PROMPT, seed=2, max_tokens=400, n=2)]
        await cluster.until(lambda: len(running[0].sink.choices[0].token_ids) > 5)
        await cluster.kill_verifier(0)
        for request in running:
            error = (await request.sink.wait()).error
            num_tokens = len(request.sink.choices[0].token_ids)
            assert error is not None
            assert error.code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert f"it has {num_tokens} of at most 400" in error.message
            assert "0.2 s" in error.message
            assert request.sink.choices[0].token_ids == request.expected()[:num_tokens]


@pytest.mark.parametrize("grpc_", [False, True])
async def test_no_verifier_at_first(grpc_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.probe._PROBE_S", 0.05)
    async with Cluster(drafters=[DrafterScript()], grpc=grpc_, min_draft_wait_ms=1000, absent=["v0"]) as cluster:
        assert cluster.engine.ready == (False, "lane 0: not connected yet")
        assert cluster.engine.description is None
        await cluster.restart_verifier(0)
        await cluster.all_there()
        await cluster.submit(PROMPT, seed=1, max_tokens=30).check()
        assert cluster.engine.counters.num_accepted_tokens > 0


@pytest.mark.parametrize("same_id", [False, True])
@pytest.mark.parametrize("network_kind", [InProcessNetwork, GrpcNetwork])
async def test_second_coordinator(network_kind: type[InProcessNetwork] | type[GrpcNetwork], same_id: bool) -> None:
    """Another id is refused and told who holds the verifier; a later incarnation of the same id takes over."""
    network = network_kind()
    address = await network.put("v0", ScriptedVerifier())
    names = ("first", "first" if same_id else "second")
    engines = [network.make_engine(CoordinatorConfig(verifiers=(address,), coordinator_id=name)) for name in names]
    await engines[0].start()
    while not engines[0].ready.is_ready:
        await engines[0].readiness_changed()
    await engines[1].start()
    if same_id:
        while engines[0].ready.is_ready:
            await engines[0].readiness_changed()
        while not engines[1].ready.is_ready:
            await engines[1].readiness_changed()
        while "incarnation" not in engines[0].ready.reason:
            await engines[0].readiness_changed()
        await engines[1].stop(0)
        while not engines[0].ready.is_ready:
            await engines[0].readiness_changed()
        await engines[0].stop(0)
    else:
        while "held by coordinator 'first'" not in engines[1].ready.reason:
            await engines[1].readiness_changed()
        assert engines[1].counters.num_verifier_refusals > 0
        assert engines[0].ready.is_ready
        await engines[0].stop(0)
        while not engines[1].ready.is_ready:
            await engines[1].readiness_changed()
        await engines[1].stop(0)
    await network.close()


async def test_a_sequence_that_no_verifier_survives_is_given_up() -> None:
    """A request that kills whatever runs it must not take the coordinator through restarts for ever; the others go on."""

    def poison(open_: VerifyOpen, index: int) -> bool:
        if open_.noise_key == 13:
            raise InternalError("the device is gone")
        return False

    async with Cluster([VerifierScript(is_bad=poison)]) as cluster:
        await cluster.ready()
        request, *others = [cluster.submit(PROMPT, seed=seed, max_tokens=60) for seed in (13, 1, 2)]
        choice = (await request.sink.wait()).choices[0]
        assert choice.finish_reason is FinishReason.ERROR
        assert choice.error is not None
        assert "the device is gone" in choice.error.message
        assert cluster.engine.counters.num_verifier_losses == 6
        for other in others:
            await other.check()


async def test_alone_and_out_of_blocks() -> None:
    """A verifier that promised more blocks than it has: the request ends with the numbers."""
    async with Cluster([VerifierScript(num_usable_blocks=10)]) as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=100)
        choice = (await request.sink.wait()).choices[0]
        assert choice.finish_reason is FinishReason.ERROR
        assert choice.error is not None
        assert choice.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert f"{len(PROMPT) + len(choice.token_ids)} tokens" in choice.error.message
        assert choice.token_ids == request.expected()[: len(choice.token_ids)]
        assert len(choice.token_ids) > 30
        await cluster.submit(PROMPT, seed=1, max_tokens=20).check()


@pytest.mark.parametrize("grpc_", [False, True])
async def test_a_hung_drafter_loses_its_sequences_to_another(grpc_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.asked_round.HUNG_S", 0.02)
    drafters = [DrafterScript(delay_s=3600), DrafterScript()]
    async with Cluster([VerifierScript(delay_s=0.001)], drafters, grpc=grpc_, min_draft_wait_ms=20) as cluster:
        await cluster.all_there()
        running = [cluster.submit(PROMPT, seed=seed, max_tokens=300) for seed in range(4)]
        await cluster.until(lambda: cluster.drafters[1].num_open == 4)
        for request in running:
            await request.check()
        assert all(r.sink.choices[0].spec_stats is not None and r.sink.choices[0].spec_stats.num_accepted_tokens > 50 for r in running)


async def test_a_drafter_that_forgot_its_sequences_gets_them_again() -> None:
    async with Cluster([VerifierScript(delay_s=0.001)], [DrafterScript()], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        running = [cluster.submit(PROMPT, seed=seed, max_tokens=200) for seed in range(3)]
        for num_tokens in (30, 60, 90, 120, 150):
            await cluster.until(lambda num_tokens=num_tokens: all(len(r.sink.choices[0].token_ids) > num_tokens for r in running))  # type: ignore[misc]
            cluster.drafters[0].forget()
        for request in running:
            await request.check()
        counters = cluster.engine.counters
        assert counters.fallbacks["drafter_stale"] == 15
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 450


async def test_the_first_wait_is_seeded_by_the_drafters_own_measurement() -> None:
    """A drafter that says that it takes long is waited for; one that says nothing is not, at a least wait of 1 ms."""
    for costs, expects_drafts in (((DraftCost(5, 1, 300.0),), True), ((), False)):
        async with Cluster(drafters=[DrafterScript(delay_s=0.03, draft_cost=costs)], min_draft_wait_ms=1) as cluster:
            await cluster.all_there()
            request = cluster.submit(PROMPT, seed=1, max_tokens=7)
            await request.check()
            stats = request.sink.choices[0].spec_stats
            assert stats is not None
            assert (stats.num_accepted_tokens > 0) == expects_drafts


async def test_a_full_drafter_leaves_the_rest_plain(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster(drafters=[DrafterScript(max_num_seqs=2)], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        running = [cluster.submit(PROMPT, seed=seed, max_tokens=20 + 10 * seed) for seed in range(5)]
        for request in running:
            await request.check()
        drafted = [r.sink.choices[0].spec_stats.num_drafts > 0 for r in running if r.sink.choices[0].spec_stats is not None]
        assert drafted[:2] == [True, True]
        assert sum(drafted) >= 3, "a slot that is freed goes to a sequence that waits for one"
        assert cluster.engine.counters.fallbacks["no_drafter"] > 0
        assert "sequences go without drafts: every drafter is absent, late or full" in caplog.text
        await cluster.settle()
        assert cluster.drafters[0].num_open == 0


async def test_a_fault_in_the_step_costs_a_reconnection_not_the_lane(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Our own mistake in one step is logged whole; the lane's sequences are opened anew."""
    async with Cluster() as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=60)
        await cluster.until(lambda: len(request.sink.choices[0].token_ids) > 10)
        lane = cluster.engine.lanes[0]
        monkeypatch.setattr(lane, "take_answers", lambda: 1 / 0)
        with caplog.at_level(logging.ERROR):
            await cluster.until(lambda: not lane.is_ready)
        monkeypatch.undo()
        await request.check()
        assert "ZeroDivisionError" in caplog.text
        assert {type(fault) for fault in cluster.faults} == {ZeroDivisionError}
        cluster.faults.clear()


async def test_peers_that_accept_a_connection_and_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped processes do: their kernel accepts for them."""
    monkeypatch.setattr("coordinator.peers._ANSWER_S", 0.2)
    monkeypatch.setattr("coordinator.probe._PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host, port = mute.getsockname()
        engine = Engine(CoordinatorConfig(verifiers=(f"{host}:{port}",)))
        await engine.start()
        async with asyncio.timeout(10):
            while "did not answer Describe within 0.2 s" not in engine.ready.reason:
                await engine.readiness_changed()
        await engine.stop(0)


async def test_a_verifier_without_a_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.peers._ANSWER_S", 0.1)
    monkeypatch.setattr("tests.scripted.local._LocalVerifyStream.receive", lambda _: asyncio.Event().wait())
    async with Cluster() as cluster, asyncio.timeout(10):
        await cluster.until(lambda: "did not answer the hello of a stream within 0.1 s" in cluster.engine.ready.reason)


@pytest.mark.parametrize("others_look", [False, True])
async def test_a_sequence_that_a_full_drafter_refuses_changes_nothing_for_others(others_look: bool) -> None:
    """They go on looking for a drafter if they did; if not, the refused one is not sent there at once again."""
    async with Cluster(drafters=[DrafterScript()], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        cluster.submit(PROMPT, seed=1, max_tokens=100)
        lane = cluster.engine.lanes[0]
        await cluster.until(lambda: bool(lane.links[0].slots))
        place = next(iter(lane.links[0].slots.values()))
        lane.pins.may_pin = others_look
        take_rows(lane.links[0], [DraftRowResult(RowStatus.OUT_OF_BLOCKS, place.index, place.epoch, len(place.sequence.token_ids))], is_asked=True)
        assert (lane.pins.may_pin, list(lane.pins.looking)) == (others_look, [place.sequence])
