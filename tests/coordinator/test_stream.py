"""Sinks and streams: nothing lost, nothing twice, in order, bounded, whatever the pace of the client."""

import asyncio
from collections import defaultdict

import pytest

from coordinator.stream import SHUTTING_DOWN, RequestStream, SessionStream
from specwire.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, GenerateRequest, TokenLogprobs, Usage
from specwire.pending import RequestSink
from specwire.sampling_params import SamplingParams
from tests.coordinator.byte_tokenizer import ids_of, make_spec
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.coordinator.streams import MANY_BYTES, MANY_REQUESTS, Gathered, collect, request

DEADLINE = ErrorStatus(4, "the deadline of 5 ms passed after 8 tokens")


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


@pytest.mark.parametrize("is_session", [False, True])
async def test_what_a_step_sends_to_its_peers_is_written_before_its_tokens(paused: ScriptedEngine, is_session: bool) -> None:
    """A writer that is woken behind the tokens, but in the same turn of the event loop, comes first."""
    stream = RequestStream(paused, request(max_tokens=4)) if not is_session else SessionStream(paused, MANY_BYTES, MANY_REQUESTS)
    if isinstance(stream, SessionStream):
        stream.start(1, request(max_tokens=4))
    order: list[str] = []
    has_mail = asyncio.Event()

    async def write() -> None:
        await has_mail.wait()
        order.append("peer")

    async def stream_out() -> None:
        async for _ in stream.updates():
            order.append("client")
            return

    tasks = [asyncio.create_task(stream_out()), asyncio.create_task(write())]
    await asyncio.sleep(0)  # both wait
    paused.step()
    has_mail.set()
    await asyncio.gather(*tasks)
    assert order == ["peer", "client"]
    stream.close()


async def test_a_request_streams_and_ends(engine: ScriptedEngine) -> None:
    stream = RequestStream(engine, request(max_tokens=10))
    updates = [choices async for choices in stream.updates()]
    # The engine's next step may come before an update is taken.
    assert len(updates) > 1
    assert [token_id for choices in updates for choice in choices for token_id in choice.token_ids] == [*range(1, 11)]
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


async def test_a_drained_session_refuses_starts_and_ends_with_its_last_request(engine: ScriptedEngine) -> None:
    session = SessionStream(engine, MANY_BYTES, MANY_REQUESTS)
    session.start(1, request(max_tokens=20))
    session.drain(SHUTTING_DOWN)
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
