"""Calls of the generated stubs, as any client would make them."""

from typing import Any

import grpc

from specwire.messages import ErrorStatus, FinishReason, GenerateRequest, SessionStart, SessionUpdate
from specwire.sampling_params import SamplingParams
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import generate


def request(last: int = 0, *, timeout_ms: int | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest([5, last], SamplingParams(**sampling), timeout_ms=timeout_ms)


def command(starts: dict[int, GenerateRequest], cancels: tuple[int, ...] = ()) -> pb.SessionRequest:
    return generate.pack_command([generate.pack_start(SessionStart(*start)) for start in starts.items()], cancels)


async def read_update(call: Any) -> SessionUpdate:
    response = await call.read()
    assert response is not grpc.aio.EOF
    return generate.unpack_update(response)


async def read_until_done(call: Any, stream_ids: set[int]) -> dict[int, tuple[list[int], FinishReason | ErrorStatus | None]]:
    """Tokens and end of the streams; each has one choice."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason | ErrorStatus | None] = {}
    done: set[int] = set()
    while done != stream_ids:
        update = await read_update(call)
        for delta in update.deltas:
            tokens.setdefault(delta.stream_id, []).extend(delta.token_ids)
        for event in update.events:
            if event.choice is not None:
                tokens.setdefault(event.stream_id, []).extend(event.choice.token_ids)
                ends[event.stream_id] = event.choice.finish_reason or ends.get(event.stream_id)
            if event.error is not None:
                ends[event.stream_id] = event.error
            if event.done:
                done.add(event.stream_id)
    return {stream_id: (tokens.get(stream_id, []), ends[stream_id]) for stream_id in stream_ids}


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """With what a call ends."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
