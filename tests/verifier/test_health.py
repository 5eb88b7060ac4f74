"""The event loop never waits for the model: health answers fast while a long prompt is prefilled."""

import asyncio
import logging
import os
import time

import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.engine.models.loader import dummy_model
from specwire.messages import RowStatus
from tests.verifier.harness import Rounds, make_verifier, open_message, prefill, serve, tiny_config

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 1500
WIDTH = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 8, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def all_threads():
    """The model takes every core, as it does in a service."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


async def probe(stub, until):
    """Health checks every 10 ms until the future is done; their latencies in ms."""
    request, latencies = health_pb2.HealthCheckRequest(), []

    async def check(due):
        reply = await stub.Check(request)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        latencies.append((asyncio.get_running_loop().time() - due) * 1e3)

    checks, due = [], asyncio.get_running_loop().time()
    while not until.done():
        # Counted from when it was due: a late start of the probe is the loop's fault too.
        checks.append(asyncio.create_task(check(due)))
        due += 0.010
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    await asyncio.gather(*checks)
    return sorted(latencies)


async def test_health_answers_during_a_long_prefill(socket_dir, all_threads):
    model = dummy_model(tiny_config(**WIDTH), torch.bfloat16)
    verifier = make_verifier(model, num_blocks=128, max_model_len=2000, max_num_batched_tokens=2000)
    async with serve(verifier, socket_dir) as served:
        stream, rounds = served.stream(), Rounds(verifier)
        await stream.start()
        started = time.monotonic()
        await stream.send(rounds.build([prefill(0, PROMPT_TOKENS)], opens=[open_message(0, [i % 49_000 for i in range(PROMPT_TOKENS)])]))
        answer = asyncio.create_task(stream.receive())
        latencies = await probe(health_pb2_grpc.HealthStub(served.channel), answer)
        seconds = time.monotonic() - started
        assert (await answer).rows[0].status == RowStatus.OK
    p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    logger.info("%d probes in %.1f s of prefill: p50 %.1f ms, p99 %.1f ms, max %.1f ms", len(latencies), seconds, p50, p99, latencies[-1])
    assert len(latencies) >= 25, f"the prefill took only {seconds:.2f} s"
    # The target is 50 ms; the machine of a test may be busy with other things, a blocked loop would show the whole prefill.
    assert p99 < 50 or p99 < 0.2 * seconds * 1e3, f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {latencies[-1]:.1f} ms in {seconds:.1f} s"
