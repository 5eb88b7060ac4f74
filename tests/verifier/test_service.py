"""The verifier over real gRPC: bad streams, faults, description, health, loading, stopping."""

import asyncio
import contextlib
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specwire.errors import InternalError
from specwire.messages import Hello, Proposals, TokenizerSpec, VerifyRound
from specwire.rpc import is_serving, open_channel
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire.describe import unpack_description, unpack_tokenizer
from tests.verifier.harness import PROMPT, LaunchGate, Rounds, VerifyStream, ends_with, make_verifier, open_message, prefill, serve
from tests.waiting import until

Code = grpc.StatusCode


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
    executor = served.verifier._executor
    launch = executor.launch

    def fail(segments, blocks):
        raise RuntimeError("device lost")

    executor.launch = fail
    await stream.send(rounds.build([prefill(1, 99)], opens=[open_message(1, list(range(60)))]))
    error = await ends_with(stream, Code.INTERNAL, "RuntimeError in /specwire.v1.VerifierService/Verify")
    assert "device lost" not in error.details()
    executor.launch = launch
    await until(lambda: served.verifier.num_open_slots == 0)
    assert served.verifier.num_free_blocks == 64


async def test_rounds_that_keep_failing_break_the_verifier(served):
    """Four faults in a row do not, nor does a round without rows between them start the count anew."""
    rounds = Rounds(served.verifier)
    launch = served.verifier.launch

    def fail(request):
        if not request.rows:
            return launch(request)
        raise RuntimeError("device lost")

    async def run(*, is_broken):
        served.verifier.launch = fail if is_broken else launch
        stream = served.stream()
        await stream.start()
        await stream.round_trip(rounds.build())
        await stream.send(rounds.build([prefill(0, 99, parent=0)], opens=[open_message(0, PROMPT)]))
        if is_broken:
            await ends_with(stream, Code.INTERNAL, "RuntimeError")
        else:
            assert (await stream.receive()).rows[0].token_ids
            await stream.finish()

    broken = asyncio.create_task(served.server.wait_broken())
    for is_broken in (*[True] * 4, False, *[True] * 4):
        await run(is_broken=is_broken)
    assert not broken.done()
    await run(is_broken=True)
    with pytest.raises(InternalError, match="5 rounds in a row failed, the last one with RuntimeError: device lost"):
        await broken


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
    assert caught.value.code() == Code.UNIMPLEMENTED
    assert "it was started with --skip-tokenizer, or its model's folder has no tokenizer.json; send token ids" in caught.value.details()


async def test_health_and_reflection(served):
    reply = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(service="specwire.v1.VerifierService"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for answer in reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(requests):
        assert "specwire.v1.VerifierService" in {service.name for service in answer.list_services_response.service}


async def test_loading_answers_not_serving_and_unavailable(model, socket_dir):
    started, loading = threading.Event(), threading.Event()
    serving = serve(make_verifier(model), socket_dir, before_load=lambda: (started.set(), loading.wait(60)))
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
        gate = LaunchGate(served.verifier)
        rounds, stream = Rounds(served.verifier), served.stream()
        await stream.start()
        await stream.send(rounds.build([prefill(0, 99)], opens=[open_message(0, PROMPT)]))
        await until(lambda: gate.num_launched == 1)
        stopping = asyncio.create_task(served.server.stop(5.0))
        await until(lambda: not served.server._gate._is_open)
        gate.open()
        assert (await stream.receive()).rows[0].token_ids == truth[:1]
        await ends_with(stream, Code.UNAVAILABLE)  # a connection that closes at once may hide the words
        async with asyncio.timeout(10):
            await stopping
        await until(lambda: served.verifier.num_open_slots == 0)
