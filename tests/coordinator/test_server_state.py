"""The coordinator's tokenizer, health and shutdown over real gRPC."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.rpc import is_serving, open_channel
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire import describe
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.calls import command, read_until_done, request
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving
from tests.waiting import until


async def test_tokenizer(socket_dir: Path) -> None:
    async with serving(ScriptedEngine(make_spec()), socket_dir) as server:
        channel = open_channel(server.bound_addresses[0])
        for _ in range(2):
            response = await CoordinatorServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest())
            assert describe.unpack_tokenizer(response.tokenizer) == make_spec()
        await channel.close()


async def test_no_tokenizer(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="send token ids instead of text") as error:
        await stub.GetTokenizer(pb.GetTokenizerRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    engine.set_ready(False, "verifier a:1 does not answer")
    with pytest.raises(grpc.aio.AioRpcError, match="verifier a:1 does not answer") as error:
        await stub.GetTokenizer(pb.GetTokenizerRequest())
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_follows_the_engine(engine: ScriptedEngine, channel: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="specwire.v1.CoordinatorService"))

    async def next_status() -> str:
        return health_pb2.HealthCheckResponse.ServingStatus.Name((await watch.read()).status)

    while await next_status() != "SERVING":
        pass
    engine.set_ready(False, "no verifier")
    assert await next_status() == "NOT_SERVING"
    assert not await is_serving(channel)
    engine.set_ready(True)
    assert await next_status() == "SERVING"
    watch.cancel()


async def test_stop_drains_sessions_and_lets_requests_end(socket_dir: Path) -> None:
    engine = ScriptedEngine()
    engine.is_paused = True
    async with serving(engine, socket_dir) as server:
        channel = open_channel(server.bound_addresses[0])
        stub = CoordinatorServiceStub(channel)
        idle, busy = stub.Session(), stub.Session()
        await idle.write(command({}))
        await busy.write(command({1: request(max_tokens=20)}))
        await until(lambda: len(engine.live) == 1)
        began = time.monotonic()
        stopping = asyncio.create_task(server.stop(1000.0))
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await idle.read()
        engine.is_paused = False
        engine.wake()
        assert (await read_until_done(busy, {1}))[1][0] == list(range(1, 21))
        await stopping
        assert time.monotonic() - began < 60
        await channel.close()
