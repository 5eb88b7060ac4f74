"""gRPC clients that do not read: what runs for them ends after client_stall_s, and they are told when they read again."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specwire.messages import GenerateRequest, SessionStart
from specwire.sampling_params import SamplingParams
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire.generate import pack_command, pack_request, pack_start
from tests.security.serving import serving
from tests.waiting import until

REQUEST = GenerateRequest([5, 6], SamplingParams(max_tokens=480, seed=1, n=16, logprobs=5))
LITTLE = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]


async def _starts(again: asyncio.Event) -> AsyncIterator[pb.SessionRequest]:
    yield pack_command([pack_start(SessionStart(stream_id, REQUEST)) for stream_id in range(1, 5)], [])
    await again.wait()
    yield pack_command([pack_start(SessionStart(9, REQUEST))], [])
    await asyncio.Event().wait()


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("kind", ["generate", "session", "batch"])
async def test_who_does_not_read_gets_nothing_more(kind: str) -> None:
    async with serving(client_stall_s=0.5) as (server, cluster), grpc.aio.insecure_channel(server.bound_addresses[0], options=LITTLE) as channel:
        engine, stub, again = cluster.engine, CoordinatorServiceStub(channel), asyncio.Event()
        if kind == "session":
            call = stub.Session(_starts(again))
        elif kind == "batch":
            call = stub.GenerateBatch(pb.GenerateBatchRequest(requests=[pack_request(REQUEST)] * 16))
        else:
            call = stub.Generate(pack_request(REQUEST))
        await until(lambda: engine.metrics.streams_stalled[kind] == 1)
        assert not engine._requests
        again.set()  # a session takes nothing more
        assert engine.metrics.streams_closed[kind] == 0
        async with asyncio.timeout(30):
            with pytest.raises(grpc.aio.AioRpcError, match=r"the client has read nothing for 0\.5 s") as error:
                await _read_all(call)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: engine.metrics.streams_closed[kind] == 1)
        assert not engine._requests


async def test_who_reads_in_time_reads_everything() -> None:
    async with serving(client_stall_s=5.0) as (server, cluster), grpc.aio.insecure_channel(server.bound_addresses[0], options=LITTLE) as channel:
        call, tokens = CoordinatorServiceStub(channel).Generate(pack_request(REQUEST)), 0
        async for response in call:
            tokens += sum(len(choice.token_origins) for choice in response.choices)
            await asyncio.sleep(0.01)
        assert tokens == 16 * 480
        assert cluster.engine.metrics.streams_stalled.total() == 0
