"""Clients that vanish while the coordinator writes to them."""

import asyncio
import logging
import sys

import grpc
import pytest

from tests.security.serving import serving
from tests.waiting import until

CLIENT = """
import sys, time, grpc
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire.generate import pack_request
little = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
stub = CoordinatorServiceStub(grpc.insecure_channel(sys.argv[1], options=little))
request = pack_request(GenerateRequest([5, 6], SamplingParams(max_tokens=480, seed=1, n=16, logprobs=5)))
calls = [stub.Generate(request) for _ in range(8)]
time.sleep(100)
"""


async def test_a_client_that_dies_with_writes_under_way_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC fails a write or cancels its call, whichever comes first: with eight calls some writes fail, unless the machine is very busy."""
    async with serving() as (server, cluster):
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, server.bound_addresses[0])
        try:
            await until(lambda: cluster.engine.num_parked > 100)
        finally:
            client.kill()
            await client.wait()
        await until(lambda: cluster.engine.metrics.streams_closed["generate"] == 8)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("error", "is_hidden"),
    [
        (grpc.aio.InternalError('Failed "execute_batch": (<grpc._cython.cygrpc.SendMessageOperation object>,)'), True),
        (grpc.aio.InternalError('Failed "execute_batch": (<grpc._cython.cygrpc.ReceiveMessageOperation object>,)'), False),
        (RuntimeError("SendMessageOperation"), False),
    ],
)
async def test_only_failed_writes_are_hidden(caplog: pytest.LogCaptureFixture, error: Exception, is_hidden: bool) -> None:
    caplog.set_level(logging.DEBUG, "specwire.statuses")
    async with serving():
        logging.getLogger("grpc._cython.cygrpc").error("Unexpected exception", exc_info=error)
    assert ("a client left while something was written to it" in caplog.text) == is_hidden
    assert ("Unexpected exception" in caplog.text) != is_hidden
