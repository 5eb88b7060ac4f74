"""Server-sent events as OpenAI's clients read them."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specwire.client import AsyncTokenStream, StreamEvent
from specwire.errors import InternalError, SpecwireError
from specwire.http.failures import Refusal, let_go
from specwire.http.lifetime import ClientGoneError, Lifetime

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response of events. One that fails in the middle says why in an event of its own; every one ends with [DONE].

    Args:
        events: objects to send, each as one event.
        lifetime: of the process's requests.
        explain: the answer that an error becomes.
        on_end: called once, with the error if there was one, when the stream has ended in any way.
        headers: further ones.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        lifetime: Lifetime,
        explain: Callable[[SpecwireError], Refusal],
        on_end: Callable[[BaseException | None], None],
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        # Proxies neither keep nor hold back what belongs to one moment.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._lifetime = lifetime
        self._explain = explain
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: BaseException | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._lifetime.run(receive, self._send_all(send))
            await _end(send)
        except ClientGoneError as error:
            failure = error
        except SpecwireError as error:
            failure = error
            await _end(send, self._explain(error).event)
        except Exception as error:
            failure = error
            logger.exception("a stream failed")
            await _end(send, self._explain(InternalError(f"{type(error).__name__}; the service's log has the details")).event)
        finally:
            self._on_end(failure)
            let_go(failure)
            failure = None

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                data = b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})


async def _end(send: Send, last: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": last + _DONE, "more_body": False})


async def merge(streams: Sequence[AsyncTokenStream]) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """The events of several generations as they come, each with its generation's position. An error of one ends all."""
    if len(streams) == 1:
        async with streams[0] as stream:
            async for event in stream:
                yield 0, event
        return
    reading = {asyncio.create_task(_next(stream)): position for position, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                position, following = reading.pop(task), task.result()
                if following is not None:
                    reading[asyncio.create_task(_next(streams[position]))] = position
                    yield position, following
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncTokenStream) -> StreamEvent | None:
    return await anext(stream, None)
