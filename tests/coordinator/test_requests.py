"""A request's life from outside: cancel, deadline, slow clients, shutdown, choices."""

import asyncio

import grpc
import pytest

from specwire.errors import UnavailableError
from specwire.messages import FinishReason, GenerateRequest
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

PROMPT = [5, 6, 7, 8, 9]


async def check_cancelled(request: Running) -> None:
    choice = (await request.sink.wait()).choices[0]
    assert choice.token_ids == request.expected()[: len(choice.token_ids)]
    assert choice.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert choice.usage is not None
    assert choice.usage.num_generated_tokens == len(choice.token_ids)
    if choice.finish_reason is FinishReason.CANCELLED:
        assert choice.error is not None
        assert choice.error.code == grpc.StatusCode.CANCELLED.value[0]


@pytest.mark.parametrize("num_drafters", [0, 1])
async def test_cancel_at_every_await_point(num_drafters: int) -> None:
    """One request is cancelled after each possible number of turns of the event loop; its neighbours do not notice."""
    async with Cluster(drafters=[DrafterScript(acceptance=0.5)] * num_drafters, min_draft_wait_ms=1000, k=3) as cluster:
        await cluster.all_there()
        reasons = set()
        for num_turns in range(200):
            neighbours = [cluster.submit(PROMPT * 9, seed=num_turns, max_tokens=12), cluster.submit([7], seed=num_turns, max_tokens=9)]
            request = cluster.submit(PROMPT * 40, seed=num_turns, max_tokens=20)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            request.handle.cancel()
            cluster.engine.check_integrity()
            request.handle.cancel()
            assert request.sink.ended
            reasons.add(request.sink.choices[0].finish_reason)
            await check_cancelled(request)
            for neighbour in neighbours:
                await neighbour.check()
        assert reasons == {FinishReason.CANCELLED, FinishReason.LENGTH}
        await cluster.until(lambda: cluster.verifiers[0].num_blocks_used == 0)
        assert all(drafter.num_open == 0 for drafter in cluster.drafters)
        assert cluster.verifiers[0].num_stray_rows == 0


async def test_cancel_over_grpc_frees_everything() -> None:
    async with Cluster(grpc=True, drafters=[DrafterScript()], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        for num_tokens in range(0, 60, 3):
            request = cluster.submit(PROMPT, seed=1, max_tokens=80)
            await cluster.until(lambda request=request, num_tokens=num_tokens: len(request.sink.choices[0].token_ids) >= num_tokens)  # type: ignore[misc]
            request.handle.cancel()
            await check_cancelled(request)
        await cluster.until(lambda: cluster.verifiers[0].num_blocks_used == 0)
        await cluster.submit([9], seed=2, max_tokens=5).check()


async def test_cancel_while_waiting() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)]) as cluster:
        await cluster.ready()
        first, waiting = cluster.submit(PROMPT, seed=1, max_tokens=30), cluster.submit(PROMPT, seed=2, max_tokens=30, n=2)
        await cluster.until(lambda: bool(first.sink.choices[0].token_ids))
        waiting.handle.cancel()
        assert [choice.finish_reason for choice in waiting.sink.choices] == [FinishReason.CANCELLED] * 2
        assert cluster.engine.lanes[0].admission.num_waiting == 0
        await first.check()


async def test_cancelling_one_choice_of_many_is_cancelling_all_that_are_left() -> None:
    async with Cluster() as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=30, n=3)
        await cluster.until(lambda: len(request.sink.choices[2].token_ids) > 4)
        request.handle.cancel()
        for index, choice in enumerate(request.sink.choices):
            assert choice.finish_reason is FinishReason.CANCELLED
            assert choice.token_ids == request.expected(index)[: len(choice.token_ids)]


@pytest.mark.parametrize("grpc_", [False, True])
async def test_deadline(grpc_: bool) -> None:
    async with Cluster([VerifierScript(delay_s=0.01)], grpc=grpc_) as cluster:
        await cluster.ready()
        request, other = cluster.submit(PROMPT, seed=1, max_tokens=200, timeout_ms=100), cluster.submit(PROMPT, seed=2, max_tokens=15)
        error = (await request.sink.wait()).error
        num_tokens = len(request.sink.choices[0].token_ids)
        assert error is not None
        assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert "timeout_ms is 100" in error.message
        assert f"{num_tokens} of at most 200 tokens" in error.message
        assert num_tokens < 20
        assert request.sink.choices[0].token_ids == request.expected()[:num_tokens]
        await other.check()
        await cluster.until(lambda: cluster.verifiers[0].num_blocks_used == 0)


async def test_deadline_while_waiting_and_deadline_kept() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1, delay_s=0.005)]) as cluster:
        await cluster.ready()
        first = cluster.submit(PROMPT, seed=1, max_tokens=30, timeout_ms=60_000)
        waiting = cluster.submit(PROMPT, seed=2, max_tokens=30, timeout_ms=20)
        error = (await waiting.sink.wait()).error
        assert error is not None
        assert "0 of at most 30 tokens" in error.message
        await first.check()


async def test_a_deadline_that_is_kept_does_nothing_later(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster() as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=10, timeout_ms=60)
        await request.check()
        await asyncio.sleep(0.08)
        assert request.sink.error is None
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("num_drafters", [0, 1])
async def test_a_slow_client_pauses_only_its_own_sequence(num_drafters: int) -> None:
    async with Cluster(drafters=[DrafterScript()] * num_drafters, max_stream_backlog=20, k=4, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        slow = cluster.submit(PROMPT, CollectingSink(holds=True, on_tokens=cluster.advance), seed=1, max_tokens=200)
        quick = cluster.submit(PROMPT, seed=2, max_tokens=400)
        await quick.check()
        backlog = slow.sink.num_unread
        # Rounds in flight when the limit was passed still arrive.
        assert 20 < backlog <= 20 + 2 * 5
        (sequence,) = cluster.engine.lanes[0].running
        assert sequence.is_paused
        num_steps = cluster.num_steps
        slow.sink.read(backlog - 11)
        assert sequence.is_paused
        slow.sink.read(1)
        assert not sequence.is_paused
        await cluster.until(lambda: slow.sink.num_unread > 20)
        assert cluster.num_steps > num_steps
        slow.sink.stop_holding()
        await slow.check()


def hold(cluster: Cluster, seed: int, **sampling: int) -> Running:
    """A request whose client does not read yet."""
    sink = CollectingSink(sampling.get("n", 1), holds=True, on_tokens=cluster.advance)
    return cluster.submit(PROMPT, sink, seed=seed, **sampling)


@pytest.mark.parametrize("num_drafters", [0, 1])
@pytest.mark.parametrize("is_short_of", ["slots", "blocks"])
async def test_clients_that_do_not_read_starve_nobody(is_short_of: str, num_drafters: int) -> None:
    script = VerifierScript(max_num_seqs=4) if is_short_of == "slots" else VerifierScript(num_usable_blocks=40)
    drafters = [DrafterScript()] * num_drafters
    async with Cluster([script], drafters, max_stream_backlog=20, k=4, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        holders = [hold(cluster, seed, max_tokens=100) for seed in range(12)]
        async with asyncio.timeout(20):
            await cluster.until(lambda: all(holder.sink.num_unread > 20 for holder in holders))
            await cluster.submit(PROMPT, seed=99, max_tokens=90).check()
        assert not any(holder.sink.ended for holder in holders)
        assert cluster.engine.num_waiting == 0
        counters, num_parked = cluster.engine.counters, cluster.engine.num_parked
        assert counters.num_pauses >= num_parked > 0
        for holder in holders:
            holder.sink.stop_holding()
        assert cluster.engine.num_parked == 0
        async with asyncio.timeout(20):
            for holder in holders:
                await holder.check()
        await cluster.until(lambda: cluster.verifiers[0].num_blocks_used == 0)


async def test_a_paused_sequence_keeps_its_place_while_nobody_wants_it() -> None:
    async with Cluster([VerifierScript(max_num_seqs=2)], max_stream_backlog=5) as cluster:
        await cluster.all_there()
        slow = hold(cluster, 1, max_tokens=100)
        await cluster.until(lambda: slow.sink.num_unread > 5)
        await cluster.submit(PROMPT, seed=2, max_tokens=50).check()
        assert (cluster.engine.num_parked, cluster.engine.counters.num_pauses) == (0, 0)
        slow.sink.stop_holding()
        await slow.check()


async def parked(cluster: Cluster, **options: int) -> Running:
    """A request whose only place went to another one."""
    await cluster.all_there()
    slow = cluster.submit(PROMPT, CollectingSink(holds=True, on_tokens=cluster.advance), seed=1, max_tokens=200, **options)
    await cluster.until(lambda: slow.sink.num_unread > 5)
    await cluster.submit(PROMPT, seed=2, max_tokens=20).check()
    assert cluster.engine.num_parked == 1
    return slow


async def test_a_parked_sequence_can_be_cancelled_and_run_out_of_time() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)], max_stream_backlog=5) as cluster:
        slow = await parked(cluster)
        slow.handle.cancel()
        await check_cancelled(slow)
        slow.sink.read(100)
        late = await parked(cluster, timeout_ms=500)
        await late.sink.wait()
        assert late.sink.error is not None
        assert late.sink.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert cluster.engine.num_parked == 0
        await cluster.submit(PROMPT, seed=1, max_tokens=20).check()


async def test_a_parked_sequence_outlives_its_verifier_but_not_the_coordinator() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)], max_stream_backlog=5) as cluster:
        slow = await parked(cluster)
        await cluster.kill_verifier(0)
        await cluster.until(lambda: not cluster.engine.ready.is_ready)
        await cluster.restart_verifier(0)
        await cluster.all_there()
        slow.sink.stop_holding()
        await slow.check()
        last = await parked(cluster)
        await cluster.engine.stop(0)
        assert last.sink.error is not None
        assert last.sink.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert cluster.engine.num_parked == 0


async def test_a_paused_sequence_that_loses_its_verifier_is_in_nobodys_way() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)], max_stream_backlog=5) as cluster:
        await cluster.all_there()
        slow = hold(cluster, 1, max_tokens=100)
        await cluster.until(lambda: slow.sink.num_unread > 5)
        await cluster.kill_verifier(0)
        await cluster.until(lambda: not cluster.engine.ready.is_ready)
        assert cluster.engine.num_parked == 1
        await cluster.restart_verifier(0)
        await cluster.all_there()
        await cluster.submit(PROMPT, seed=2, max_tokens=20).check()
        slow.sink.stop_holding()
        await slow.check()


async def test_a_paused_sequence_can_be_cancelled() -> None:
    async with Cluster(max_stream_backlog=5) as cluster:
        slow = (await cluster.ready()).submit(PROMPT, CollectingSink(holds=True, on_tokens=cluster.advance), seed=1, max_tokens=200)
        await cluster.until(lambda: slow.sink.num_unread > 5)
        slow.handle.cancel()
        await check_cancelled(slow)
        slow.sink.read(100)
        await cluster.submit(PROMPT, seed=1, max_tokens=20).check()


async def test_shutdown_lets_requests_finish() -> None:
    async with Cluster([VerifierScript(delay_s=0.001)]) as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=30)
        stopping = asyncio.create_task(cluster.engine.stop(30))
        await asyncio.sleep(0)
        assert not cluster.engine.ready.is_ready
        with pytest.raises(UnavailableError, match="shutting down"):
            cluster.submit(PROMPT, seed=1, max_tokens=30)
        await request.check()
        await stopping


async def test_shutdown_fails_what_takes_longer_than_its_grace() -> None:
    async with Cluster([VerifierScript(delay_s=0.01)]) as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=400)
        await cluster.engine.stop(0.05)
        error = request.sink.error
        assert error is not None
        assert error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert "shutting down" in error.message


async def test_choices_share_the_prefix_cache_and_report_it() -> None:
    async with Cluster() as cluster:
        request = (await cluster.ready()).submit([7] * 101, seed=1, max_tokens=5)
        await request.check()
        again = cluster.submit([7] * 101, seed=2, max_tokens=5)
        await again.check()
        usages = [r.sink.choices[0].usage for r in (request, again)]
        assert [usage.num_cached_tokens for usage in usages if usage is not None] == [0, 100]


async def test_an_empty_request_id_and_a_repeated_one_are_both_fine() -> None:
    async with Cluster() as cluster:
        await cluster.ready()
        sinks = [CollectingSink() for _ in range(2)]
        for sink in sinks:
            cluster.engine.submit(GenerateRequest(PROMPT, request_id="same"), sink)
        for sink in sinks:
            assert (await sink.wait()).choices[0].finish_reason is FinishReason.LENGTH
