"""The coordinator's calls over real gRPC, with the generated stubs as any client would use them."""

import asyncio

import grpc
import pytest

from specwire.messages import ErrorStatus, FinishReason, GenerateRequest
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire import generate
from tests.coordinator.calls import command, read_until_done, read_update, request, status
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.waiting import until
from tests.wire.responses import unpack_response

# --- Generate -------------------------------------------------------------------------------------------------------


async def test_generate_streams_deltas(stub: CoordinatorServiceStub) -> None:
    choices = [choice async for message in stub.Generate(generate.pack_request(request(max_tokens=10))) for choice in unpack_response(message)]
    assert [token for choice in choices for token in choice.token_ids] == list(range(1, 11))
    assert choices[-1].finish_reason is FinishReason.LENGTH


async def test_a_refused_request_has_its_status(stub: CoordinatorServiceStub) -> None:
    code, details = await status(stub.Generate(generate.pack_request(request(1000))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "token id 1000" in details
    assert "from 0 to 999" in details


async def test_an_array_that_is_no_array_is_refused(stub: CoordinatorServiceStub) -> None:
    code, details = await status(stub.Generate(pb.GenerateRequest(prompt_token_ids=b"abc")))
    assert (code, "prompt_token_ids has 3 bytes" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_bytes_that_are_no_message_are_the_clients_mistake(channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture) -> None:
    call = channel.stream_stream("/specwire.v1.CoordinatorService/Session")()
    await call.write(b"\xff" * 5)
    code, details = await status(call)
    assert (code, "a message could not be read" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
    assert "unexpected error" not in caplog.text


async def test_a_sampling_parameter_out_of_range_is_refused(stub: CoordinatorServiceStub) -> None:
    message = generate.pack_request(request())
    message.sampling.top_p = 1.5
    code, details = await status(stub.Generate(message))
    assert (code, "top_p is 1.5" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_failure_has_its_status(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    call = stub.Generate(generate.pack_request(request()))
    ending = asyncio.create_task(status(call))
    await until(lambda: bool(engine.live))
    engine.live[0].fail(ErrorStatus(grpc.StatusCode.UNAVAILABLE.value[0], "the verifier is gone after 0 tokens"))
    assert await ending == (grpc.StatusCode.UNAVAILABLE, "the verifier is gone after 0 tokens")


@pytest.mark.parametrize("num_read", [0, 1, 2])
async def test_cancelling_generate_cancels_in_the_engine(engine: ScriptedEngine, stub: CoordinatorServiceStub, num_read: int) -> None:
    engine.is_paused = True
    call = stub.Generate(generate.pack_request(request(max_tokens=100)))
    waiting = asyncio.create_task(call.read())
    await until(lambda: bool(engine.live))
    for _ in range(num_read):
        engine.step()
        await waiting
        waiting = asyncio.create_task(call.read())
    call.cancel()
    await until(lambda: not engine.live)
    assert engine.requests[0].is_cancelled
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_client_that_does_not_read_is_cancelled_too(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    """The handler is suspended in a write then, not in the generator."""
    engine.vocab_size = 1 << 30
    engine.tokens_per_step, engine.max_stream_backlog = 4000, 8000
    call = stub.Generate(generate.pack_request(request(max_tokens=None)))
    await until(lambda: bool(engine.requests) and engine.requests[0].is_waiting_for_client)
    call.cancel()
    await until(lambda: not engine.live)
    assert engine.requests[0].is_cancelled


async def test_a_channel_that_closes_cancels(engine: ScriptedEngine, channel: grpc.aio.Channel, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    calls = [stub.Generate(generate.pack_request(request())) for _ in range(3)]
    reads = [asyncio.create_task(call.read()) for call in calls]
    await until(lambda: len(engine.live) == 3)
    await channel.close()
    await until(lambda: not engine.live)
    await asyncio.gather(*reads, return_exceptions=True)


async def test_the_calls_deadline_reaches_the_engine_and_ends_the_request(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    code, _ = await status(stub.Generate(generate.pack_request(request(timeout_ms=60_000)), timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < (engine.requests[0].request.timeout_ms or 0) <= 210  # gRPC rounds deadlines up
    await until(lambda: not engine.live)
    assert engine.requests[0].is_cancelled


@pytest.mark.parametrize(("timeout_ms", "call_s", "expected"), [(None, None, None), (700, None, 700), (700, 60.0, 700), (None, 60.0, 60_000)])
async def test_the_engine_gets_the_shorter_of_both_times(
    engine: ScriptedEngine, stub: CoordinatorServiceStub, timeout_ms: int | None, call_s: float | None, expected: int | None
) -> None:
    assert await status(stub.Generate(generate.pack_request(request(max_tokens=1, timeout_ms=timeout_ms)), timeout=call_s)) == (
        grpc.StatusCode.OK,
        "",
    )
    assert engine.requests[0].request.timeout_ms == (pytest.approx(expected, abs=2000) if call_s and not timeout_ms else expected)


async def test_no_time_at_all_is_refused(stub: CoordinatorServiceStub) -> None:
    code, details = await status(stub.Generate(generate.pack_request(request(timeout_ms=0))))
    assert (code, "timeout_ms is 0" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_explicit_zeros_arrive_as_zeros(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    zeros = {"temperature": 0.0, "seed": 0, "logprobs": 0, "min_tokens": 0, "top_k": 0, "max_draft_tokens": 0, "priority": 0, "min_p": 0.0}
    await status(stub.Generate(generate.pack_request(request(max_tokens=1, **zeros))))
    sampling = engine.requests[0].request.sampling
    assert {name: getattr(sampling, name) for name in zeros} == zeros
    assert sampling.seed is not None
    await status(stub.Generate(generate.pack_request(request(max_tokens=1))))
    assert (engine.requests[1].request.sampling.seed, engine.requests[1].request.sampling.logprobs) == (None, None)


async def test_a_request_over_the_message_limit_is_refused_with_its_size(stub: CoordinatorServiceStub) -> None:
    message = generate.pack_request(GenerateRequest([1] * (1 << 19)))
    code, details = await status(stub.Generate(message))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(message.ByteSize()) in details
    assert str(1 << 20) in details


# --- Session --------------------------------------------------------------------------------------------------------


async def test_a_session_multiplexes(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    call = stub.Session()
    await call.write(command({stream_id: request(stream_id, max_tokens=10 + stream_id) for stream_id in range(1, 8)}))
    found = await read_until_done(call, set(range(1, 8)))
    assert found == {i: (expected_tokens([i], 0, 10 + i, 1000), FinishReason.LENGTH) for i in range(1, 8)}
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_half_close_lets_running_requests_end(stub: CoordinatorServiceStub) -> None:
    call = stub.Session()
    await call.write(command({1: request(max_tokens=50)}))
    await call.done_writing()
    assert (await read_until_done(call, {1}))[1][0] == list(range(1, 51))
    assert await call.read() is grpc.aio.EOF


async def test_one_message_a_step(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    call = stub.Session()
    await call.write(command({stream_id: request(max_tokens=100) for stream_id in range(1, 31)}))
    await until(lambda: len(engine.live) == 30)
    for _ in range(5):
        engine.step()
        update = await read_update(call)
        assert sorted(delta.stream_id for delta in update.deltas) == list(range(1, 31))
    call.cancel()


async def test_bad_starts_answer_only_their_own_stream(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    call = stub.Session()
    message = command({1: request(max_tokens=20), 2: request(1000), 3: request(max_tokens=8), 4: request(), 5: request(), 6: request(timeout_ms=-1)})
    message.starts[3].request.prompt_token_ids = b"odd"
    message.starts[4].request.sampling.temperature = -1.0
    message.starts.add(stream_id=1, request=message.starts[0].request)
    await call.write(message)
    update = await read_update(call)
    errors = {event.stream_id: (event.error, event.done) for event in update.events}
    assert {stream_id: (error.code, done) for stream_id, (error, done) in errors.items() if error} == {
        2: (3, True), 4: (3, True), 5: (3, True), 6: (3, True), 1: (3, False)
    }  # fmt: skip
    expected = {2: "token id 1000", 4: "prompt_token_ids has 3 bytes", 5: "temperature is -1", 6: "timeout_ms is -1", 1: "stream id 1 is in use"}
    assert all(expected[stream_id] in error.message for stream_id, (error, _) in errors.items() if error)
    engine.is_paused = False
    engine.wake()
    assert await read_until_done(call, {1, 3}) == {1: (list(range(1, 21)), FinishReason.LENGTH), 3: (list(range(1, 9)), FinishReason.LENGTH)}
    call.cancel()


async def test_a_full_queue_refuses_by_event(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused, engine.max_queue = True, 2
    call = stub.Session()
    await call.write(command({stream_id: request() for stream_id in (1, 2, 3)}))
    (event,) = (await read_update(call)).events
    assert event.error is not None
    assert (event.stream_id, event.error.code, event.done) == (3, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)
    call.cancel()


async def test_cancel_by_message(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    call = stub.Session()
    await call.write(command({1: request(), 2: request()}))
    await until(lambda: len(engine.live) == 2)
    await call.write(command({}, cancels=(2, 77)))
    await until(lambda: len(engine.live) == 1)
    assert (await read_until_done(call, {2}))[2] == ([], FinishReason.CANCELLED)
    await call.write(command({2: request()}))  # the id is free again
    await until(lambda: len(engine.live) == 2)
    call.cancel()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
async def test_a_session_that_goes_away_cancels_everything(engine: ScriptedEngine, stub: CoordinatorServiceStub, num_steps: int) -> None:
    engine.is_paused = True
    call = stub.Session()
    await call.write(command({stream_id: request() for stream_id in range(1, 21)}))
    await until(lambda: len(engine.live) == 20)
    for _ in range(num_steps):
        engine.step()
        await read_update(call)
    call.cancel()
    await until(lambda: not engine.live)
    assert all(scripted.is_cancelled for scripted in engine.requests)


async def test_a_slow_client_gets_longer_updates_and_the_engine_waits(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    """Transport buffers fill, then deltas merge up to the backlog limit, then the sequence waits; nothing is lost."""
    engine.vocab_size = 1 << 30
    engine.tokens_per_step, engine.max_stream_backlog = 4000, 20_000
    call = stub.Session()
    num_tokens = 2_000_000
    await call.write(command({1: request(max_tokens=num_tokens)}))
    await until(lambda: bool(engine.requests) and engine.requests[0].is_waiting_for_client)
    assert engine.requests[0].num_tokens[0] < num_tokens
    sizes, tokens = [], []
    while len(tokens) < num_tokens:
        update = await read_update(call)
        new = [token for delta in update.deltas for token in delta.token_ids]
        new += [token for event in update.events if event.choice for token in event.choice.token_ids]
        sizes.append(len(new))
        tokens += new
    assert tokens == list(range(1, num_tokens + 1))
    assert 20_000 < max(sizes) <= 20_000 + engine.tokens_per_step
    call.cancel()


async def test_a_session_message_over_the_limit_ends_the_session_with_its_size(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    call = stub.Session()
    await call.write(command({1: request()}))
    await until(lambda: len(engine.live) == 1)
    message = command({2: GenerateRequest([1] * (1 << 19))})
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(message.ByteSize()) in (error.value.details() or "")
    await until(lambda: not engine.live)


async def test_an_engine_that_breaks_ends_the_session_with_internal(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    call = stub.Session()
    engine.submit = None  # type: ignore[method-assign,assignment]
    await call.write(command({1: request()}))
    with pytest.raises(grpc.aio.AioRpcError, match="log has the details") as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INTERNAL
