"""The three ways to stream requests: each gathers what the engine gives and hands it out as fast as its client reads.

All have `updates()`, what to send, and `close()`, which cancels what still runs: idempotent, for whenever the client leaves.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from specwire.errors import InvalidArgumentError, ResourceExhaustedError, SpecwireError, UnavailableError
from specwire.messages import ChoiceDelta, ErrorStatus, GenerateRequest, SessionEvent, SessionUpdate, StreamDelta
from specwire.pending import RequestSink
from specwire.statuses import error_from_status

from .admission import RETRY_AFTER_MS
from .ending import error_status
from .engine import RequestHandle
from .metrics import Metrics
from .outbox import Outbox, SessionSink
from .sink import Sink

_MAX_STREAM_ID = 2**63 - 1
_MAX_UNREAD = 512
"""Streams and refusals with something to read, above which nothing more is taken from a session's client."""
SHUTTING_DOWN = "the coordinator is shutting down; connect again, or to another one"


class Submitter(Protocol):
    """Takes requests: the engine itself, or the engine within the limits of an API key."""

    @property
    def metrics(self) -> Metrics:
        """The engine's."""

    def submit(self, message: GenerateRequest, sink: Sink) -> RequestHandle:
        """As Engine.submit."""


class RequestStream:
    """One request; `updates` ends with it, or raises its error.

    Raises:
        SpecwireError: the engine refused the request.
    """

    def __init__(self, engine: Submitter, request: GenerateRequest) -> None:
        self._wake = asyncio.Event()
        self._sink = RequestSink(request.sampling.n, lambda _: _set_soon(self._wake))
        self._handle = engine.submit(request, self._sink)

    def close(self) -> None:
        self._handle.cancel()

    async def updates(self) -> AsyncIterator[list[ChoiceDelta]]:
        ended = False
        while not ended:
            await self._wake.wait()
            self._wake.clear()
            ended = self._sink.ended
            choices = [pending.to_delta() for pending in self._sink.take()]
            if choices:
                yield choices
        if self._sink.error is not None:
            raise error_from_status(self._sink.error)


class SessionStream:
    """Many requests of one front end. One update holds everything that waits at that moment: a step's tokens, or, for a client that
    reads slowly, several steps'.

    Args:
        max_update_bytes: about how long an update may get; what does not fit follows in the next one.
        max_requests: most requests that have not ended.
    """

    def __init__(self, engine: Submitter, max_update_bytes: int, max_requests: int) -> None:
        self._max_requests = max_requests
        self._engine = engine
        self._max_update_bytes = max_update_bytes
        self._wake = asyncio.Event()
        self._live: dict[int, RequestHandle] = {}
        self._outbox = Outbox(partial(_set_soon, self._wake))
        self._pending: deque[tuple[int, RequestSink]] = deque()  # whatever is more than plain tokens
        self._refused: list[SessionEvent] = []
        self._has_room = asyncio.Event()
        self._input_has_ended = False
        self._draining = ""
        self._failure: Exception | None = None

    def start(self, stream_id: int, request: GenerateRequest) -> None:
        """Submits a request under a stream id that the client chose.

        Raises:
            InvalidArgumentError: the stream id is in use, or too large.
            UnavailableError: the session is being drained.
            ResourceExhaustedError: it has too many unfinished requests.
            SpecwireError: the engine refused the request.
        """
        if self._draining:
            raise UnavailableError(self._draining)
        if stream_id > _MAX_STREAM_ID:
            raise InvalidArgumentError(f"stream id {stream_id} is above {_MAX_STREAM_ID}; count stream ids from 1")
        if stream_id in self._live:
            raise InvalidArgumentError(f"stream id {stream_id} is in use by a running request; choose one that is not among the live streams")
        if len(self._live) >= self._max_requests:
            text = f"{len(self._live)} requests of the session have not ended, and max_session_requests is {self._max_requests}"
            raise ResourceExhaustedError(f"{text}; wait for one to end, or raise max_session_requests", retry_after_ms=RETRY_AFTER_MS)
        sink = SessionSink(stream_id, request.sampling.n, self._outbox, partial(self._add_pending, stream_id))
        self._live[stream_id] = self._engine.submit(request, sink)

    def refuse(self, stream_id: int, error: SpecwireError) -> None:
        """Tells the client why a start failed. A live request of the same id goes on, so only without one the id is done."""
        self._engine.metrics.refused(error)
        self._refused.append(SessionEvent(stream_id, error=error_status(error), done=stream_id not in self._live))
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Returns once the client has read most of what it asked for; a client that never reads must not fill the memory with answers."""
        while len(self._pending) + len(self._refused) + self._outbox.num_streams > _MAX_UNREAD:
            self._has_room.clear()
            await self._has_room.wait()

    def cancel(self, stream_id: int) -> None:
        """Ends a request; ids that are not live are ignored, since the request may just have ended."""
        if stream_id in self._live:
            self._live[stream_id].cancel()

    def end_input(self, failure: Exception | None = None) -> None:
        """The client starts nothing more: `updates` ends once all requests have, or raises the failure at once."""
        self._input_has_ended = True
        self._failure = failure
        self._wake.set()

    def drain(self, reason: str) -> None:
        """Refuses further starts; `updates` raises UnavailableError once all requests have ended."""
        self._draining = reason
        self._wake.set()

    def close(self) -> None:
        self._draining = self._draining or SHUTTING_DOWN
        for handle in list(self._live.values()):
            handle.cancel()

    async def updates(self) -> AsyncIterator[SessionUpdate]:
        while True:
            while self._outbox.deltas or self._pending or self._refused:
                yield self._take_update()
            if self._failure is not None:
                raise self._failure
            if not self._live and self._input_has_ended:
                return
            if not self._live and self._draining:
                raise UnavailableError(self._draining)
            await self._wake.wait()
            self._wake.clear()

    def _add_pending(self, stream_id: int, sink: RequestSink) -> None:
        self._pending.append((stream_id, sink))
        _set_soon(self._wake)

    def _take_update(self) -> SessionUpdate:
        deltas, num_bytes = self._outbox.take(self._max_update_bytes)
        events, self._refused = self._refused, []
        self._has_room.set()
        # A request's text, logprobs and end must not overtake its plain tokens.
        while self._pending and not self._outbox.deltas and num_bytes < self._max_update_bytes:
            stream_id, sink = self._pending.popleft()
            for pending in sink.take():
                num_bytes += pending.num_bytes
                if pending.is_plain:
                    deltas.append(StreamDelta(stream_id, pending.index, pending.token_ids, pending.token_origins))
                else:
                    events.append(SessionEvent(stream_id, pending.to_delta()))
            if sink.ended:
                self._live.pop(stream_id, None)
                events.append(SessionEvent(stream_id, error=sink.error, done=True))
        return SessionUpdate(deltas, events)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """All choices of the batch's request `index`, or why it failed (with the choices that it had until then)."""

    index: int
    choices: list[ChoiceDelta]
    error: ErrorStatus | None


class BatchStream:
    """Many requests whose results are wanted whole, in the order in which they end.

    Args:
        requests: what to run; an error in place of a request that could not be read is its result.
        max_in_flight: most choices submitted whose results are not sent yet, so that a batch does not fill the queue for others; a request
            with more goes alone.
    """

    def __init__(self, engine: Submitter, requests: Sequence[GenerateRequest | SpecwireError], max_in_flight: int) -> None:
        self._engine = engine
        self._waiting = deque(enumerate(requests))
        self._max_in_flight = max_in_flight
        self._wake = asyncio.Event()
        self._live: dict[int, RequestHandle] = {}
        self._results: deque[BatchResult] = deque()
        self._num_choices: dict[int, int] = {}  # of requests that were submitted or refused, until their results are sent
        self._num_in_flight = 0
        self._draining = ""

    def drain(self, reason: str) -> None:
        """What was not submitted yet fails with UnavailableError."""
        self._draining = reason

    def close(self) -> None:
        self._waiting.clear()
        for handle in list(self._live.values()):
            handle.cancel()

    async def updates(self) -> AsyncIterator[BatchResult]:
        while True:
            self._submit()
            if self._results:
                result = self._results.popleft()
                self._num_in_flight -= self._num_choices.pop(result.index)
                yield result
            elif self._live:
                await self._wake.wait()
                self._wake.clear()
            else:
                return

    def _submit(self) -> None:
        """Submits what there is room for; when the engine's queue is full, the rest waits for this batch's own requests to end."""
        while self._waiting:
            index, request = self._waiting[0]
            num_choices = 1 if isinstance(request, SpecwireError) else request.sampling.n
            if self._num_in_flight and self._num_in_flight + num_choices > self._max_in_flight:
                return
            try:
                if isinstance(request, SpecwireError):
                    raise request
                if self._draining:
                    raise UnavailableError(self._draining)
                sink = RequestSink(num_choices, partial(self._add_result, index), whole=True)
                self._live[index] = self._engine.submit(request, sink)
            except SpecwireError as error:
                if isinstance(error, ResourceExhaustedError) and error.retry_after_ms is not None and self._live:
                    return
                self._engine.metrics.refused(error)
                self._results.append(BatchResult(index, [], error_status(error)))
            self._num_choices[index] = num_choices
            self._num_in_flight += num_choices
            self._waiting.popleft()

    def _add_result(self, index: int, sink: RequestSink) -> None:
        self._live.pop(index, None)
        choices = sorted((pending.to_delta() for pending in sink.take()), key=lambda choice: choice.index)
        self._results.append(BatchResult(index, choices, sink.error))
        self._wake.set()


def _set_soon(event: asyncio.Event) -> None:
    """A turn of the event loop later: the step that has these tokens asks for what comes next in the turn after this one, and its messages to
    drafters and verifiers are not to wait until those to clients are packed."""
    asyncio.get_running_loop().call_soon(event.set)
