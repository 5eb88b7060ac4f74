"""GenerateBatch over real gRPC, with the generated stubs as any client would use it."""

from typing import Any

from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire import generate
from tests.coordinator.calls import request
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.waiting import until
from tests.wire.responses import unpack_batch_response


async def batch_results(call: Any) -> list[tuple]:
    return [unpack_batch_response(message) async for message in call]


async def test_batch(stub: CoordinatorServiceStub) -> None:
    requests = [request(i, max_tokens=40 - 2 * i) for i in range(20)] + [request(1000)]
    message = pb.GenerateBatchRequest(requests=map(generate.pack_request, requests))
    message.requests[4].prompt_token_ids = b"odd"
    found = {index: (choices, error) for index, choices, error in await batch_results(stub.GenerateBatch(message))}
    assert sorted(found) == list(range(21))
    for index, (choices, error) in found.items():
        if index in (4, 20):
            assert error.code == 3
        else:
            assert error is None
            assert choices[0].token_ids == expected_tokens([index], 0, 40 - 2 * index, 1000)


async def test_a_cancelled_batch_cancels_its_requests(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.is_paused = True
    call = stub.GenerateBatch(pb.GenerateBatchRequest(requests=[generate.pack_request(request()) for _ in range(20)]))
    await until(lambda: len(engine.live) == 4)  # half of the queue
    call.cancel()
    await until(lambda: not engine.live)
    assert len(engine.requests) == 4


async def test_a_result_over_the_message_limit_is_an_error_of_its_own(engine: ScriptedEngine, stub: CoordinatorServiceStub) -> None:
    engine.tokens_per_step = 2000
    engine.vocab_size = 1 << 30
    requests = [request(max_tokens=20_000, logprobs=20), request(max_tokens=3)]
    found = await batch_results(stub.GenerateBatch(pb.GenerateBatchRequest(requests=map(generate.pack_request, requests))))
    assert [(index, len(choices), error and error.code) for index, choices, error in found] == [(1, 1, None), (0, 0, 8)]
    assert "bytes, but a message may have 1048576" in found[1][2].message
