"""Streams whose clients read slowly, or never: longer updates, bounded memory, nothing lost."""

import asyncio
import random

import pytest

from coordinator.stream import SessionStream
from specwire.errors import InvalidArgumentError
from specwire.messages import ChoiceDelta, FinishReason
from specwire.pending import RequestSink
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.coordinator.streams import MANY_BYTES, MANY_REQUESTS, Gathered, collect, request


def test_backlog_and_its_notification() -> None:
    sink, calls = RequestSink(1, lambda _: None), []
    sink.notify_below(1, lambda: calls.append("at once"))
    assert calls == ["at once"]
    sink.delta(0, list(range(10)), bytes(10))
    sink.choice(ChoiceDelta(0, [10, 11], bytes(2)))
    assert sink.num_backlog_tokens == 12
    sink.notify_below(12, lambda: calls.append("twelve"))
    sink.notify_below(13, lambda: calls.append("thirteen"))
    assert calls == ["at once", "thirteen"]
    sink.take()
    assert sink.num_backlog_tokens == 0
    assert calls == ["at once", "thirteen", "twelve"]
    sink.delta(0, [1], bytes(1))
    sink.take()
    assert len(calls) == 3


async def test_what_a_slow_client_missed_comes_as_one_entry(paused: ScriptedEngine) -> None:
    session = SessionStream(paused, MANY_BYTES, MANY_REQUESTS)
    session.start(7, request(max_tokens=100, n=2))
    updates = session.updates()
    for _ in range(5):
        paused.step()
    update = await anext(updates)
    assert [(d.stream_id, d.choice_index, len(d.token_ids), len(d.token_origins)) for d in update.deltas] == [(7, 0, 20, 20), (7, 1, 20, 20)]
    assert update.events == []


async def test_backlog_stops_the_sequence_and_reading_starts_it_again(engine: ScriptedEngine) -> None:
    engine.max_stream_backlog = 64
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    session.start(1, request(max_tokens=900))
    session.end_input()
    updates, largest, total = session.updates(), 0, 0
    for _ in range(100):
        await asyncio.sleep(0)
    assert engine.requests[0].is_waiting_for_client
    assert engine.num_steps < 20
    async for update in updates:
        gathered = Gathered().add(update)
        size = sum(map(len, gathered.tokens.values()))
        largest, total = max(largest, size), total + size
        for _ in range(40):  # a slow reader
            await asyncio.sleep(0)
    assert total == 900
    assert 64 < largest <= 64 + engine.tokens_per_step


async def test_updates_are_bounded_in_bytes(paused: ScriptedEngine) -> None:
    session = SessionStream(paused, 1000, MANY_REQUESTS)
    for stream_id in range(1, 101):
        session.start(stream_id, request(stream_id, max_tokens=4, logprobs=3))
    session.end_input()
    paused.step()
    updates, gathered = await collect(session), Gathered()
    for update in updates:
        gathered.add(update)
    assert 10 < len(updates) < 100
    assert all(gathered.tokens[stream_id, 0] == expected_tokens([stream_id], 0, 4, 1000) for stream_id in range(1, 101))
    assert sorted(gathered.done) == list(range(1, 101))


async def test_a_client_that_does_not_read_its_refusals_is_read_no_further(engine: ScriptedEngine) -> None:
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    num_refused = 0

    async def read() -> None:
        nonlocal num_refused
        while num_refused < 5000:
            await session.wait_for_room()
            num_refused += 1
            session.refuse(num_refused, InvalidArgumentError("no"))

    reading = asyncio.create_task(read())
    updates = session.updates()
    num_read = 0
    while num_read < 5000:
        for _ in range(3):
            await asyncio.sleep(0)
        assert 0 < num_refused - num_read <= 513
        num_read += len((await anext(updates)).events)
    await reading


@pytest.mark.parametrize("seed", range(20))
async def test_random_pace_of_engine_and_client(engine: ScriptedEngine, seed: int) -> None:
    """Starts, cancels, steps and reads in any order: each stream's tokens are a beginning of its own, and whole unless cancelled."""
    draw = random.Random(seed)
    engine.is_paused = True
    engine.max_stream_backlog = draw.choice([8, 1024])
    session = SessionStream(engine, draw.choice([200, MANY_BYTES]), MANY_REQUESTS)
    updates, gathered, cancelled = session.updates(), Gathered(), set()
    lengths = {stream_id: draw.randint(1, 60) for stream_id in range(1, 41)}
    waiting = list(lengths)
    while waiting or engine.live:
        action = draw.random()
        if action < 0.3 and waiting:
            stream_id = waiting.pop()
            logprobs = draw.choice([None, None, 0, 2])
            session.start(stream_id, request(stream_id, max_tokens=lengths[stream_id], logprobs=logprobs))
        elif action < 0.35:
            stream_id = draw.choice(list(lengths))
            if stream_id not in waiting and (stream_id, 0) not in gathered.ends:
                session.cancel(stream_id)
                cancelled.add(stream_id)
        elif action < 0.8:
            engine.step()
        elif session._pending:
            gathered.add(await anext(updates))
    session.end_input()
    async for update in updates:
        gathered.add(update)
    assert sorted(gathered.done) == list(lengths)
    for stream_id, length in lengths.items():
        tokens, end = gathered.tokens[stream_id, 0], gathered.ends[stream_id, 0]
        assert tokens == expected_tokens([stream_id], 0, len(tokens), 1000)
        assert len(gathered.origins[stream_id, 0]) == len(tokens)
        assert end.usage is not None
        assert end.usage.num_generated_tokens == len(tokens)
        assert (end.finish_reason, len(tokens)) == (FinishReason.LENGTH, length) or stream_id in cancelled
