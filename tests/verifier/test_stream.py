"""The verifier over real gRPC: streams, run-ahead, one coordinator at a time, errors as statuses."""

import asyncio
import contextlib
import threading

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specwire.messages import Hello, Proposals, SlotRef, TokenizerSpec, VerifyRound
from specwire.rpc import is_serving, open_channel
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire.common import unpack_description, unpack_tokenizer
from tests.verifier.harness import Rounds, VerifyStream, ahead, decode, make_verifier, open_message, prefill, reference, serve, tiny_model

PROMPT = [5, 17, 33, 8, 21, 40, 9]
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model()


@pytest.fixture
async def served(model, socket_dir):
    async with serve(make_verifier(model), socket_dir) as served:
        yield served


@pytest.fixture
def truth(model):
    return [token_id for token_id, _, _ in reference(model, PROMPT, 12)]


async def ends_with(stream, code, match=""):
    """Reads a stream to its end, which must be this status."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(stream)
    assert (caught.value.code(), match in caught.value.details()) == (code, True), caught.value
    return caught.value


async def drain(stream):
    while await stream.receive() is not None:
        pass


async def until(condition, timeout_s=5.0):
    """Waits for something that other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are states of code that has no event for a test
            await asyncio.sleep(0.001)


class Gate:
    """Holds the verifier's worker at a launch until it is opened; counts launches."""

    def __init__(self, verifier):
        self.num_launched = 0
        self._launch, self._open = verifier.launch, threading.Event()
        verifier.launch = self._hold

    def open(self):
        self._open.set()

    def _hold(self, request):
        self.num_launched += 1
        assert self._open.wait(10)
        return self._launch(request)


# --- rounds ---------------------------------------------------------------------------------------------------------


async def test_a_generation_with_drafts(served, truth):
    rounds, stream = Rounds(served.verifier), served.stream()
    welcome = await stream.start()
    assert (welcome.round, welcome.rows, welcome.welcome.instance_id, welcome.welcome.free_blocks) == (0, [], "instance-1", 64)
    first = await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)], traceparent="00-ab-cd-01"))
    assert (first.session, first.round, first.traceparent) == (1, 1, "00-ab-cd-01")
    assert 0 < first.timing.received_ns <= first.timing.started_ns <= first.timing.finished_ns <= first.timing.sent_ns
    tokens = PROMPT + first.rows[0].token_ids
    second = await stream.round_trip(rounds.build([decode(0, tokens, [*truth[1:3], 60])]))
    assert (second.rows[0].num_accepted, second.rows[0].token_ids) == (2, truth[1:4])
    closed = await stream.round_trip(rounds.build(closes=[SlotRef(0, 1)]))
    assert (closed.rows, closed.free_blocks, closed.promised_blocks) == ([], 64, 0)
    await stream.finish()
    assert await stream.receive() is None


async def test_hello_may_carry_the_first_round(served, truth):
    stream = served.stream()
    await stream.send(Rounds(served.verifier).build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    welcome, first = await stream.receive(), await stream.receive()
    assert welcome.welcome is not None
    assert first.rows[0].token_ids == truth[:1]


async def test_run_ahead_keeps_two_rounds_outstanding(served, truth):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 4)], opens=[open_message(0, PROMPT)]))
    await stream.send(rounds.build([prefill(0, 4)]))
    got = []
    for base_len in range(len(PROMPT) + 1, len(PROMPT) + 11):
        got += (await stream.receive()).rows[0].token_ids
        await stream.send(rounds.build([ahead(0, base_len, rounds.round)]))
    for _ in range(2):
        got += (await stream.receive()).rows[0].token_ids
    assert got == truth[:11]


async def test_promised_blocks_cover_queued_rounds(served):
    gate = Gate(served.verifier)
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 17)], opens=[open_message(0, list(range(60)))]))
    await stream.send(rounds.build([prefill(0, 43)]))
    await until(lambda: gate.num_launched == 1 and len(served.server._gate._holder._queued) == 1)
    gate.open()
    first, second = await stream.receive(), await stream.receive()
    assert (first.free_blocks, first.promised_blocks) == (62, 2)
    assert (second.free_blocks, second.promised_blocks) == (60, 0)


@pytest.mark.parametrize(("ours", "theirs", "effective"), [(2, 2, 2), (2, 5, 2), (3, 1, 1)])
async def test_more_than_w_outstanding_rounds_end_the_stream(model, socket_dir, ours, theirs, effective):
    async with serve(make_verifier(model), socket_dir, max_outstanding_rounds=ours) as served:
        gate = Gate(served.verifier)
        rounds, stream = Rounds(served.verifier), served.stream(max_outstanding_rounds=theirs)
        assert (await stream.start()).welcome.max_outstanding_rounds == effective
        for _ in range(effective + 1):
            await stream.send(rounds.build())
        await until(lambda: served.server._gate._holder._is_closed)
        gate.open()
        for _ in range(effective):
            assert (await stream.receive()).rows == []
        await ends_with(stream, Code.FAILED_PRECONDITION, f"max_outstanding_rounds is {effective}")


# --- ends of streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["finish", "cancel", "channel"])
async def test_the_end_of_a_stream_frees_everything(served, how):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, list(range(60)))]))
    assert served.verifier.num_free_blocks == 60
    if how == "finish":
        await stream.finish()
        assert await stream.receive() is None
    elif how == "cancel":
        stream.cancel()
    else:
        await served.channel.close()
    await until(lambda: served.verifier.num_open_slots == 0)
    assert served.verifier.num_free_blocks == 64
    served.verifier.check_integrity()


async def test_queued_rounds_of_an_ended_stream_never_run(served):
    gate = Gate(served.verifier)
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    await stream.send(rounds.build([prefill(1, 99)], opens=[open_message(1, PROMPT)]))
    await until(lambda: gate.num_launched == 1)
    stream.cancel()
    other = served.stream("d")
    async with asyncio.timeout(5):  # the running round does not keep the next coordinator out
        while True:
            try:
                await other.start()
                break
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                other = served.stream("d")
    gate.open()
    answer = await other.round_trip(Rounds(served.verifier).build())
    assert gate.num_launched == 2
    assert (answer.free_blocks, served.verifier.num_open_slots) == (64, 0)


# --- one coordinator at a time --------------------------------------------------------------------------------------


async def test_a_second_coordinator_is_refused_by_name(served, truth):
    holder, other = served.stream("lane-a"), served.stream("lane-b", incarnation=99)
    await holder.start()
    await other.send(VerifyRound(1, 0, 0))
    await ends_with(other, Code.FAILED_PRECONDITION, "coordinator 'lane-a' holds this verifier, and 'lane-b' cannot have it too")
    answer = await holder.round_trip(Rounds(served.verifier).build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    assert answer.rows[0].token_ids == truth[:1]


async def test_a_lower_incarnation_is_refused(served):
    holder, old = served.stream("c", incarnation=5), served.stream("c", incarnation=4)
    await holder.start()
    await old.send(VerifyRound(1, 0, 0))
    await ends_with(old, Code.FAILED_PRECONDITION, "incarnation 5 of coordinator 'c' holds this verifier, and 4 is older")
    assert (await holder.round_trip(VerifyRound(1, 0, 1))).round == 1


@pytest.mark.parametrize("incarnation", [5, 6])
async def test_an_equal_or_higher_incarnation_takes_over_at_once(served, truth, incarnation):
    gate = Gate(served.verifier)
    holder, rounds = served.stream("c", incarnation=5), Rounds(served.verifier)
    await holder.start()
    await holder.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))  # will be running
    await holder.send(rounds.build([prefill(1, 99)], opens=[open_message(1, PROMPT)]))  # will be queued
    await until(lambda: gate.num_launched == 1)
    heir, new = served.stream("c", incarnation=incarnation), Rounds(served.verifier)
    welcome = await heir.start()
    assert welcome.welcome.free_blocks == 64
    await ends_with(holder, Code.ABORTED, f"taken over by a new stream of coordinator 'c', incarnation {incarnation}")
    await heir.send(new.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))  # the same slot and epoch
    gate.open()
    answer = await heir.receive()
    assert (answer.rows[0].token_ids, gate.num_launched, served.verifier.num_open_slots) == (truth[:1], 2, 1)
    assert answer.free_blocks == 63


async def test_the_verifier_is_free_after_its_coordinator(served):
    for name, incarnation in (("a", 9), ("b", 1), ("a", 1)):
        stream = served.stream(name, incarnation)
        await stream.start()
        await stream.finish()
        assert await stream.receive() is None


# --- bad input ------------------------------------------------------------------------------------------------------


async def raw(served, *requests):
    """A stream of hand-made messages."""
    stream = VerifyStream(served.stub, Hello("c", 1, 2))
    stream._hello = None
    for request in requests:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await stream._call.write(request)
    return stream


HELLO = {"coordinator_id": "c", "incarnation": 1, "max_outstanding_rounds": 2}
BAD_STREAMS = {
    "no hello": ([pb.VerifyRequest(round=1)], Code.INVALID_ARGUMENT, "must have hello"),
    "no coordinator id": ([pb.VerifyRequest(hello=HELLO | {"coordinator_id": ""})], Code.INVALID_ARGUMENT, "non-empty id"),
    "W = 0": ([pb.VerifyRequest(hello=HELLO | {"max_outstanding_rounds": 0})], Code.INVALID_ARGUMENT, "0 outstanding rounds"),
    "hello twice": ([pb.VerifyRequest(hello=HELLO), pb.VerifyRequest(hello=HELLO, round=1)], Code.INVALID_ARGUMENT, "only the first message"),
    "round 0 with a close": ([pb.VerifyRequest(hello=HELLO, closes=[{}])], Code.INVALID_ARGUMENT, "round 0 follows round 0"),
    "rounds descend": ([pb.VerifyRequest(hello=HELLO, round=2), pb.VerifyRequest(round=2)], Code.INVALID_ARGUMENT, "round 2 follows round 2"),
    "ragged columns": (
        [pb.VerifyRequest(hello=HELLO, round=1, rows={"slots": b"\0" * 8, "epochs": b"\0" * 4})], Code.INVALID_ARGUMENT,
        "epochs has 1 values, but slots has 2",
    ),
    "odd bytes": ([pb.VerifyRequest(hello=HELLO, round=1, rows={"slots": b"\0" * 7})], Code.INVALID_ARGUMENT, "rows.slots has 7 bytes"),
    "bad sampling": (
        [pb.VerifyRequest(hello=HELLO, round=1, opens=[{"slot": 1, "sampling": {"temperature": -1.0}}])], Code.INVALID_ARGUMENT, "temperature is -1",
    ),
    "two opens of a slot": ([pb.VerifyRequest(hello=HELLO, round=1, opens=[{"slot": 1}, {"slot": 1}])], Code.INVALID_ARGUMENT, "slot 1 is open"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STREAMS)
async def test_bad_streams_end_with_a_status_that_says_why(served, name):
    requests, code, match = BAD_STREAMS[name]
    await ends_with(await raw(served, *requests), code, match)
    again = served.stream()
    await again.start()
    assert (await again.round_trip(VerifyRound(1, 0, 1))).free_blocks == 64


async def test_a_bad_message_comes_after_the_answers_before_it(served, truth):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    await stream.send(VerifyRound(1, 0, 1))
    assert (await stream.receive()).rows[0].token_ids == truth[:1]
    await ends_with(stream, Code.INVALID_ARGUMENT, "round 1 follows round 1")


async def test_unsupported_rounds_end_the_stream_by_name(served):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    await stream.send(rounds.build([prefill(0, 99)], proposals=Proposals(1, [], [])))
    await ends_with(stream, Code.UNIMPLEMENTED, "ratio test")


async def test_a_fault_of_the_model_ends_the_stream_and_frees_its_blocks(served):
    rounds, stream = Rounds(served.verifier), served.stream()
    await stream.start()
    await stream.round_trip(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
    forward = served.verifier._runner.forward

    def fail(batch):
        raise RuntimeError("device lost")

    served.verifier._runner.forward = fail
    await stream.send(rounds.build([prefill(1, 99)], opens=[open_message(1, list(range(60)))]))
    error = await ends_with(stream, Code.INTERNAL, "RuntimeError in /specwire.v1.VerifierService/Verify")
    assert "device lost" not in error.details()
    served.verifier._runner.forward = forward
    await until(lambda: served.verifier.num_open_slots == 0)
    assert served.verifier.num_free_blocks == 64


async def test_a_message_over_the_limit_is_refused_with_a_status(model, socket_dir):
    async with serve(make_verifier(model), socket_dir, max_message_bytes=100_000) as served, open_channel(served.address) as channel:
        stream = VerifyStream(verifier_pb2_grpc.VerifierServiceStub(channel), Hello("c", 1, 2))
        await stream.start()
        await stream.send(VerifyRound(1, 0, 1, opens=[open_message(0, [1] * 30_000)]))
        await ends_with(stream, Code.RESOURCE_EXHAUSTED, "100000")
        again = served.stream()
        await again.start()
        assert (await again.round_trip(VerifyRound(1, 0, 1))).free_blocks == 64


# --- description, health, loading, stopping -------------------------------------------------------------------------


async def test_describe_and_tokenizer(model, socket_dir):
    spec = TokenizerSpec(b'{"a": 1}', "f" * 64, (2,), 61, chat_template="{{ x }}", bos_token_id=0, model_id="tiny", max_model_len=256)
    async with serve(make_verifier(model), socket_dir, tokenizer=spec) as served:
        description = unpack_description((await served.stub.Describe(pb.VerifierServiceDescribeRequest())).description)
        assert (description.vocab_size, description.num_blocks, description.max_num_draft_tokens) == (61, 64, 8)
        assert unpack_tokenizer((await served.stub.GetTokenizer(pb.VerifierServiceGetTokenizerRequest())).tokenizer) == spec


async def test_a_verifier_without_tokenizer_says_so(served):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.GetTokenizer(pb.VerifierServiceGetTokenizerRequest())
    assert caught.value.code() == Code.FAILED_PRECONDITION
    assert "no tokenizer.json" in caught.value.details()


async def test_health_and_reflection(served):
    reply = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(service="specwire.v1.VerifierService"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for answer in reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(requests):
        assert "specwire.v1.VerifierService" in {service.name for service in answer.list_services_response.service}


async def test_loading_answers_not_serving_and_unavailable(model, socket_dir):
    started, loading = threading.Event(), threading.Event()
    serving = serve(make_verifier(model), socket_dir, before_load=lambda: (started.set(), loading.wait(10)))
    starting = asyncio.create_task(serving.__aenter__())
    await until(started.is_set)
    async with grpc.aio.insecure_channel(f"unix:{next(socket_dir.iterdir())}") as channel:
        stream = VerifyStream(verifier_pb2_grpc.VerifierServiceStub(channel), Hello("c", 1, 2))
        await stream.send(VerifyRound(1, 0, 0))
        await ends_with(stream, Code.UNAVAILABLE, "still loading")
        for method, request in (("Describe", pb.VerifierServiceDescribeRequest()), ("GetTokenizer", pb.VerifierServiceGetTokenizerRequest())):
            with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
                await getattr(verifier_pb2_grpc.VerifierServiceStub(channel), method)(request)
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        loading.set()
        await starting
        assert await is_serving(channel)
    await serving.__aexit__(None, None, None)


async def test_stopping_answers_what_is_outstanding_then_ends_the_stream(model, socket_dir, truth):
    async with serve(make_verifier(model), socket_dir) as served:
        gate = Gate(served.verifier)
        rounds, stream = Rounds(served.verifier), served.stream()
        await stream.start()
        await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
        await until(lambda: gate.num_launched == 1)
        stopping = asyncio.create_task(served.server.stop(5.0))
        await until(lambda: not served.server._gate._is_open)
        gate.open()
        assert (await stream.receive()).rows[0].token_ids == truth[:1]
        await ends_with(stream, Code.UNAVAILABLE, "the verifier is stopping")
        async with asyncio.timeout(2):
            await stopping
        await until(lambda: served.verifier.num_open_slots == 0)
