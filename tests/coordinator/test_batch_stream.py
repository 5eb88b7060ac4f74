"""Batches: whole results as they end, within a window of the queue."""

import asyncio

from coordinator.stream import BatchResult, BatchStream
from specwire.errors import InvalidArgumentError
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.coordinator.streams import request


async def results(batch: BatchStream) -> list[BatchResult]:
    return [result async for result in batch.updates()]


async def test_batch_results_are_whole_and_come_as_they_end(engine: ScriptedEngine) -> None:
    batch = BatchStream(engine, [request(i, max_tokens=40 - 4 * i, n=2) for i in range(8)], 100)
    found = await results(batch)
    assert [result.index for result in found] == [7, 6, 5, 4, 3, 2, 1, 0]
    for result in found:
        assert result.error is None
        assert [c.token_ids for c in result.choices] == [expected_tokens([result.index], n, 40 - 4 * result.index, 1000) for n in range(2)]
        assert [c.finish_reason for c in result.choices] == [FinishReason.LENGTH] * 2


async def test_choices_of_a_result_are_in_order(paused: ScriptedEngine) -> None:
    batch = BatchStream(paused, [request(n=3)], 100)
    updates = batch.updates()
    reading = asyncio.create_task(anext(updates))
    await asyncio.sleep(0)
    for index in (2, 0, 1):
        paused.live[0].sink.choice(ChoiceDelta(index, [index], b"\x01", finish_reason=FinishReason.LENGTH))
    assert [choice.token_ids for choice in (await reading).choices] == [[0], [1], [2]]


async def test_batch_is_not_held_up_by_the_backlog_limit(engine: ScriptedEngine) -> None:
    engine.max_stream_backlog = 8
    found = await results(BatchStream(engine, [request(max_tokens=500)], 100))
    assert len(found[0].choices[0].token_ids) == 500


async def test_bad_requests_of_a_batch_fail_alone(engine: ScriptedEngine) -> None:
    requests = [request(max_tokens=4), request(1000), InvalidArgumentError("top_p is 7"), request(max_tokens=8)]
    found = {result.index: result for result in await results(BatchStream(engine, requests, 100))}
    assert {index: result.error and result.error.code for index, result in found.items()} == {0: None, 1: 3, 2: 3, 3: None}
    assert found[2].error == ErrorStatus(3, "top_p is 7")


async def test_a_batch_keeps_to_its_window(engine: ScriptedEngine) -> None:
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, len(engine.live))

    engine.on_step = count
    found = await results(BatchStream(engine, [request(i, max_tokens=9) for i in range(30)], 4))
    assert sorted(result.index for result in found) == list(range(30))
    assert 1 <= most <= 4
    assert all(result.error is None for result in found)


async def test_a_batch_waits_for_room_in_the_queue(engine: ScriptedEngine) -> None:
    engine.max_queue = 3
    engine.retry_after_ms = 1000
    found = await results(BatchStream(engine, [request(i, max_tokens=9) for i in range(20)], 100))
    assert sorted(result.index for result in found) == list(range(20))
    assert all(result.error is None for result in found)


async def test_what_can_never_be_taken_holds_up_no_batch(paused: ScriptedEngine) -> None:
    """A refusal without a time to come back is a result at once, though other requests of the batch still run."""
    paused.max_queue = 2
    updates = BatchStream(paused, [request(i, max_tokens=4) for i in range(4)], 100).updates()
    assert [(await anext(updates)).index for _ in range(2)] == [2, 3]
    paused.step()
    assert sorted([(await anext(updates)).index for _ in range(2)]) == [0, 1]


async def test_choices_count_in_the_window(engine: ScriptedEngine) -> None:
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, sum(len(scripted.running) for scripted in engine.live))

    engine.on_step = count
    found = await results(BatchStream(engine, [request(i, max_tokens=9, n=n) for i, n in enumerate([2, 1, 3, 1, 7, 2, 2])], 5))
    assert sorted(result.index for result in found) == list(range(7))
    assert most == 7, "five, and one request with more alone"
    assert all(result.error is None for result in found)


async def test_a_batch_that_finds_no_room_at_all_says_so(paused: ScriptedEngine) -> None:
    paused.max_queue = 0
    found = await results(BatchStream(paused, [request(), request()], 100))
    assert [result.error and result.error.code for result in found] == [8, 8]


async def test_closing_a_batch_cancels_what_runs_and_starts_nothing_more(paused: ScriptedEngine) -> None:
    batch = BatchStream(paused, [request(i) for i in range(10)], 4)
    reading = asyncio.create_task(anext(batch.updates()))
    await asyncio.sleep(0)
    assert len(paused.live) == 4
    batch.close()
    batch.close()
    assert paused.live == []
    assert len(paused.requests) == 4
    await reading
