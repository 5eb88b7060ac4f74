"""Sends what it is told to and reads what comes, without knowing what either means."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import grpc

from tests.fuzz.strategies import Conversation

TYPED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
    }
)
"""What a call may end with, whatever it has sent. INTERNAL and UNKNOWN are faults."""
_ANSWER_S = 60.0
_LOST_STATUS = "Internal error from Core"
"""grpcio's own, where a write met the end of the call (grpc issue 36066): what the service said is lost, but not what it logged."""


@dataclass
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    details: str = ""
    responses: list[bytes] = field(default_factory=list)


class Caller:
    """One method of one service.

    Args:
        channel: to the service.
        path: of the method, as in "/package.Service/Method".
        streams: whether it takes a stream; else the conversation's first message is the request.
        waits: for an answer, or the end, after each message.
    """

    def __init__(self, channel: grpc.aio.Channel, path: str, *, streams: bool, waits: bool = False) -> None:
        self._streams = streams
        self._waits = waits
        self._method = channel.stream_stream(path) if streams else channel.unary_stream(path)

    async def call(self, conversation: Conversation) -> Outcome:
        """Raises TimeoutError if the service neither answers nor ends."""
        outcome, has_news = Outcome(), asyncio.Event()
        call = self._method() if self._streams else self._method(conversation.messages[0])
        reader = asyncio.create_task(_read(call, outcome, has_news))
        async with asyncio.timeout(_ANSWER_S):
            try:
                if self._streams:
                    await self._write(call, conversation, reader, has_news)
                if conversation.leaves:
                    call.cancel()
                await reader
            finally:
                reader.cancel()
                call.cancel()
        return outcome

    async def _write(self, call: grpc.aio.StreamStreamCall, conversation: Conversation, reader: asyncio.Task[None], has_news: asyncio.Event) -> None:
        # A call that has ended takes no more; the reader says why.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for data in conversation.messages:
                has_news.clear()
                await call.write(data)
                if self._waits and not reader.done():
                    await has_news.wait()
            if not conversation.leaves:
                await call.done_writing()


async def _read(call: grpc.aio.StreamStreamCall, outcome: Outcome, has_news: asyncio.Event) -> None:
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            outcome.responses.append(response)
            has_news.set()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        if not call.done():
            raise
    outcome.code, outcome.details = await call.code(), await call.details() or ""
    if outcome.details == _LOST_STATUS:
        outcome.code = grpc.StatusCode.UNAVAILABLE
    has_news.set()
