"""Requests for generations, from their headers to the end of their answers."""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from specwire.errors import SpecwireError
from specwire.http.board import Board
from specwire.http.failures import refusal_of
from specwire.http.lifetime import ClientGoneError, Lifetime
from specwire.http.metrics import DISCONNECTS, FAILED_STREAMS, GenerationClock
from specwire.http.planning import plan
from specwire.http.requests import ChatRequest, SamplingFields
from specwire.http.spans import HttpSpans, RequestSpan
from specwire.http.streaming import EventStream
from specwire.http.upstream import Caller, Upstream
from specwire.tracing import Attributes

Event = dict[str, Any]
_MAX_ID = 64
_VARIANT = "x-specwire-variant"
"""The header that asks for one."""


class Generations:
    """Generates what requests ask for.

    Args:
        upstream: the coordinator.
        lifetime: of the process's requests.
        board: counts.
        spans: of traced requests.
    """

    def __init__(self, upstream: Upstream, lifetime: Lifetime, board: Board, spans: HttpSpans) -> None:
        self._spans = spans
        self._upstream = upstream
        self._lifetime = lifetime
        self._board = board

    async def answer(self, request: Request, body: SamplingFields) -> Response:
        """The answer, whole or as a stream that has begun: what is refused has a status of its own, not an event.

        Raises:
            Refusal: the request is wrong, or can't be served.
            ClientGoneError: the client has left meanwhile.
        """
        clock = GenerationClock(self._board)
        explain = partial(refusal_of, names=body.names | {"variant": _VARIANT})
        answer_id = _make_id(body, request.headers.get("x-request-id"))
        headers = {"x-request-id": answer_id}
        variant = request.headers.get(_VARIANT, "")
        with self._spans.follow(request.headers.get("traceparent")) as span, contextlib.ExitStack() as held:
            held.callback(clock.end)
            if span is not None:
                held.push(_span_end(span, {"specwire.request_id": answer_id, "specwire.path": request.url.path, "specwire.is_streamed": body.stream}))
            try:
                caller = held.enter_context(self._upstream.caller(request.headers.get("authorization")))
                if not body.stream:
                    return JSONResponse(await self._lifetime.run(request.receive, _whole(body, caller, answer_id, variant, clock)), headers=headers)
                first, events = await self._lifetime.run(request.receive, _begin(body, caller, answer_id, variant, clock))
            except SpecwireError as error:
                raise explain(error) from error
            kept = held.pop_all()
        return EventStream(_behind(first, events), self._lifetime, explain, partial(self._ended, kept), headers)

    def _ended(self, held: contextlib.ExitStack, failure: BaseException | None) -> None:
        """A stream has."""
        if isinstance(failure, ClientGoneError):
            self._board.add(DISCONNECTS, ("streaming",))
        elif failure is not None:
            self._board.add(FAILED_STREAMS)
        if failure is None:
            held.close()
        else:
            held.__exit__(type(failure), failure, failure.__traceback__)


def _span_end(span: RequestSpan, attributes: Attributes) -> Callable[[object, BaseException | None, object], None]:
    """What ends a span together with its request, and is told the request's error."""

    def end(_: object, error: BaseException | None, __: object) -> None:
        span.end(attributes, error)

    return end


async def _whole(body: SamplingFields, caller: Caller, answer_id: str, variant: str, clock: GenerationClock) -> Event:
    generation = await plan(body, caller, answer_id, variant)
    return await generation.whole(clock)


async def _begin(
    body: SamplingFields, caller: Caller, answer_id: str, variant: str, clock: GenerationClock
) -> tuple[Event, AsyncGenerator[Event, None]]:
    """The first event of a stream, and the others."""
    generation = await plan(body, caller, answer_id, variant)
    events = generation.stream(clock, includes_usage=body.includes_usage, counts_on=body.counts_on)
    return await anext(events), events


async def _behind(first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


def _make_id(body: SamplingFields, wanted: str | None) -> str:
    """An answer's id, with what the client calls its request if it says so."""
    own = wanted[:_MAX_ID] if wanted and wanted.isascii() and wanted.isprintable() else uuid.uuid4().hex
    return f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{own}"
