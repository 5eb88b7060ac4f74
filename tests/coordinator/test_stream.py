"""Sinks and streams: nothing lost, nothing twice, in order, bounded, whatever the pace of the client."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from coordinator.stream import BatchResult, BatchStream, RequestStream, SessionStream
from specwire.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, GenerateRequest, SessionUpdate, TokenLogprobs, Usage
from specwire.pending import RequestSink
from specwire.sampling_params import SamplingParams
from tests.coordinator.byte_tokenizer import ids_of, make_spec
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens

DEADLINE = ErrorStatus(4, "the deadline of 5 ms passed after 8 tokens")
MANY_BYTES, MANY_REQUESTS = 1 << 25, 4096


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()


@pytest.fixture
async def paused(engine: ScriptedEngine) -> ScriptedEngine:
    engine.is_paused = True
    return engine


def request(last: int = 0, *, timeout_ms: int | None = None, **sampling: object) -> GenerateRequest:
    return GenerateRequest([5, last], SamplingParams(**sampling), timeout_ms=timeout_ms)


async def collect(session: SessionStream) -> list[SessionUpdate]:
    return [update async for update in session.updates()]


class Gathered:
    """What a client makes of a session's updates."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.origins: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.ends: dict[tuple[int, int], ChoiceDelta] = {}
        self.errors: dict[int, ErrorStatus] = {}
        self.done: list[int] = []

    def add(self, update: SessionUpdate) -> "Gathered":
        for stream_id, index, token_ids, origins in update.deltas:
            assert (stream_id, index) not in self.ends
            self.tokens[stream_id, index] += token_ids
            self.origins[stream_id, index] += origins
        for event in update.events:
            assert event.stream_id not in self.done
            if event.choice is not None:
                key = event.stream_id, event.choice.index
                assert key not in self.ends
                self.tokens[key] += event.choice.token_ids
                self.origins[key] += event.choice.token_origins
                if event.choice.finish_reason is not None:
                    self.ends[key] = event.choice
            if event.error is not None:
                self.errors[event.stream_id] = event.error
            if event.done:
                self.done.append(event.stream_id)
        return self


# --- one sink -------------------------------------------------------------------------------------------------------


def test_a_sink_announces_once_until_it_is_taken() -> None:
    announced: list[RequestSink] = []
    sink = RequestSink(1, announced.append)
    sink.delta(0, [1, 2], b"\x01\x02")
    sink.delta(0, [3], b"\x03")
    assert announced == [sink]
    assert [(p.index, p.token_ids, p.token_origins, p.is_plain) for p in sink.take()] == [(0, [1, 2, 3], b"\x01\x02\x03", True)]
    sink.delta(0, [4], b"\x01")
    assert announced == [sink, sink]


def test_a_sink_keeps_nothing_of_the_callers_list() -> None:
    sink = RequestSink(1, lambda _: None)
    tokens = [1, 2]
    sink.delta(0, tokens, b"\x01\x01")
    sink.delta(0, [3], b"\x01")
    assert tokens == [1, 2]
    tokens.append(9)
    assert [p.token_ids for p in sink.take()] == [[1, 2, 3]]


def test_deltas_and_choices_merge_in_order() -> None:
    sink = RequestSink(1, lambda _: None)
    first, second, third = TokenLogprobs(-1.0, [(1, -1.0)]), TokenLogprobs(-2.0, [(2, -2.0)]), TokenLogprobs(-3.0, [(3, -3.0)])
    sink.delta(0, [1], b"\x01")
    sink.choice(ChoiceDelta(0, [2], b"\x02", text="", logprobs=[first]))
    sink.choice(ChoiceDelta(0, [3, 4], b"\x03\x04", text="ab", logprobs=[second, third]))
    sink.choice(ChoiceDelta(0, [], b"", text="c", finish_reason=FinishReason.STOP, stop_cause="x", usage=Usage(1, 0, 4)))
    assert sink.ended
    assert [p.to_delta() for p in sink.take()] == [
        ChoiceDelta(0, [1, 2, 3, 4], b"\x01\x02\x03\x04", "abc", [first, second, third], FinishReason.STOP, "x", Usage(1, 0, 4))
    ]


def test_a_sink_ends_with_its_last_choice_and_then_ignores_calls() -> None:
    sink = RequestSink(2, lambda _: None)
    sink.choice(ChoiceDelta(1, finish_reason=FinishReason.LENGTH))
    assert not sink.ended
    sink.choice(ChoiceDelta(0, finish_reason=FinishReason.LENGTH))
    assert sink.ended
    sink.delta(0, [1], b"\x01")
    sink.choice(ChoiceDelta(0, [1], b"\x01"))
    sink.fail(DEADLINE)
    assert [p.to_delta().token_ids for p in sink.take()] == [[], []]
    assert sink.error is None


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


def test_a_whole_sink_has_no_backlog_and_announces_only_its_end() -> None:
    announced: list[RequestSink] = []
    sink = RequestSink(1, announced.append, whole=True)
    sink.delta(0, [1, 2], b"\x01\x01")
    sink.choice(ChoiceDelta(0, [3], b"\x01", text="a"))
    assert (announced, sink.num_backlog_tokens) == ([], 0)
    sink.choice(ChoiceDelta(0, [4], b"\x01", finish_reason=FinishReason.LENGTH))
    assert announced == [sink]
    assert [p.to_delta().token_ids for p in sink.take()] == [[1, 2, 3, 4]]


# --- one request ----------------------------------------------------------------------------------------------------


async def test_a_request_streams_and_ends(engine: ScriptedEngine) -> None:
    stream = RequestStream(engine, request(max_tokens=10))
    updates = [choices async for choices in stream.updates()]
    assert [[c.token_ids for c in choices] for choices in updates] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10]]]
    assert updates[-1][0].finish_reason is FinishReason.LENGTH
    assert updates[-1][0].usage == Usage(2, 0, 10)


async def test_a_failed_request_gives_its_tokens_then_its_error(paused: ScriptedEngine) -> None:
    stream = RequestStream(paused, request(max_tokens=100))
    paused.step()
    paused.live[0].fail(DEADLINE)
    updates = stream.updates()
    assert [c.token_ids for c in await anext(updates)] == [[1, 2, 3, 4]]
    with pytest.raises(DeadlineExceededError, match="5 ms passed after 8 tokens"):
        await anext(updates)


# --- a session ------------------------------------------------------------------------------------------------------


async def test_one_update_a_step_holds_every_stream(paused: ScriptedEngine) -> None:
    session = SessionStream(paused, MANY_BYTES, MANY_REQUESTS)
    for stream_id in range(1, 51):
        session.start(stream_id, request(stream_id, max_tokens=12))
    session.end_input()
    updates = session.updates()
    for step in range(3):
        paused.step()
        update = await anext(updates)
        gathered = Gathered().add(update)
        assert gathered.tokens == {(stream_id, 0): expected_tokens([stream_id], 0, 12, 1000)[4 * step : 4 * step + 4] for stream_id in range(1, 51)}
        assert len(update.deltas) == (50 if step < 2 else 0)
    assert sorted(gathered.done) == list(range(1, 51))
    with pytest.raises(StopAsyncIteration):
        await anext(updates)


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


async def test_a_refused_start_disturbs_nobody(engine: ScriptedEngine) -> None:
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    session.start(1, request(max_tokens=20))
    with pytest.raises(InvalidArgumentError, match="token id 1000") as wrong_id:
        session.start(2, request(1000))
    session.refuse(2, wrong_id.value)
    with pytest.raises(InvalidArgumentError, match="stream id 1 is in use") as in_use:
        session.start(1, request())
    session.refuse(1, in_use.value)
    with pytest.raises(InvalidArgumentError, match=f"stream id {2**63} is above"):
        session.start(2**63, request())
    session.start(2, request(max_tokens=4))  # the refused id is free
    session.end_input()
    updates = await collect(session)
    refusals = [event for event in updates[0].events if event.error]
    assert [(e.stream_id, e.error.code, e.done) for e in refusals if e.error] == [(2, 3, True), (1, 3, False)]
    tokens: dict[int, list[int]] = defaultdict(list)
    for update in updates:
        for delta in update.deltas:
            tokens[delta.stream_id] += delta.token_ids
        for event in update.events:
            tokens[event.stream_id] += event.choice.token_ids if event.choice else []
    assert tokens == {1: expected_tokens([0], 0, 20, 1000), 2: expected_tokens([0], 0, 4, 1000)}


async def test_a_refusal_is_sent_even_if_nothing_else_ever_was(engine: ScriptedEngine) -> None:
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    session.refuse(3, InvalidArgumentError("no"))
    session.end_input()
    assert [[e.stream_id for e in update.events] for update in await collect(session)] == [[3]]


async def test_cancel_ends_only_its_stream(paused: ScriptedEngine) -> None:
    session = SessionStream(paused, MANY_BYTES, MANY_REQUESTS)
    session.start(1, request(max_tokens=12))
    session.start(2, request(max_tokens=12, n=2))
    session.end_input()
    paused.step()
    session.cancel(2)
    session.cancel(2)
    session.cancel(99)
    assert [live.request.sampling.n for live in paused.live] == [1]
    paused.step()
    paused.step()
    gathered = Gathered()
    for update in await collect(session):
        gathered.add(update)
    assert sorted(gathered.done) == [1, 2]
    assert {key: end.finish_reason for key, end in gathered.ends.items()} == {
        (1, 0): FinishReason.LENGTH, (2, 0): FinishReason.CANCELLED, (2, 1): FinishReason.CANCELLED
    }  # fmt: skip
    assert gathered.tokens[2, 1] == expected_tokens([0], 1, 4, 1000)


async def test_an_id_can_be_used_again_after_its_end(engine: ScriptedEngine) -> None:
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    updates = session.updates()
    for _ in range(3):
        session.start(1, request(max_tokens=4))
        assert Gathered().add(await anext(updates)).done == [1]


async def test_close_cancels_everything_and_is_idempotent(paused: ScriptedEngine) -> None:
    session = SessionStream(paused, MANY_BYTES, MANY_REQUESTS)
    for stream_id in range(5):
        session.start(stream_id, request())
    session.close()
    session.close()
    assert paused.live == []
    assert all(scripted.is_cancelled for scripted in paused.requests)


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


async def test_a_drained_session_refuses_starts_and_ends_with_its_last_request(engine: ScriptedEngine) -> None:
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    session.start(1, request(max_tokens=20))
    session.drain()
    with pytest.raises(UnavailableError, match="shutting down"):
        session.start(2, request())
    updates, gathered = session.updates(), Gathered()
    while not gathered.done:
        gathered.add(await anext(updates))
    with pytest.raises(UnavailableError, match="shutting down"):
        await anext(updates)


async def test_stop_strings_bring_text(engine: ScriptedEngine) -> None:
    engine.close()
    spelling = ScriptedEngine(make_spec())
    try:
        session = SessionStream(spelling, MANY_BYTES, MANY_REQUESTS)
        session.start(1, GenerateRequest(ids_of("@"), SamplingParams(stop=("HI",))))
        session.end_input()
        events = [event for update in await collect(session) for event in update.events if event.choice]
        assert "".join(event.choice.text or "" for event in events if event.choice) == "ABCDEFG"
        assert events[-1].choice is not None
        assert events[-1].choice.stop_cause == "HI"
    finally:
        spelling.close()


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


# --- a batch --------------------------------------------------------------------------------------------------------


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
    found = await results(BatchStream(engine, [request(i, max_tokens=9) for i in range(20)], 100))
    assert sorted(result.index for result in found) == list(range(20))
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
