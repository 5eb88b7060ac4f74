"""One generation as its user sees it: events with text as they come, or everything at the end."""

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

from specwire.client.generation import Deadline, Generation
from specwire.client.home import Home
from specwire.client.results import Choice, GenerationResult, StreamEvent
from specwire.errors import FailedPreconditionError, InternalError, SpecwireError
from specwire.messages import ChoiceDelta, FinishReason, SpecStats, TokenOrigin, Usage
from specwire.statuses import error_from_status

if TYPE_CHECKING:
    from specwire.tokenizer import IncrementalDecoder

_ORIGINS = {origin.value: origin for origin in TokenOrigin}


class AsyncTokenStream:
    """An asynchronous iterator over a generation's events, sent off by the first read. A reader that falls behind gets longer events.

    Leaving it early in any way (break, an exception, the task's cancellation, `aclose`, `async with`) ends the generation.
    """

    def __init__(self, begin: Callable[[], Awaitable[Generation]], deadline: Deadline) -> None:
        self._begin = begin
        self._deadline = deadline
        self._generation: Generation | None = None
        self._home: Home | None = None
        self._is_reading = False
        self._closed = False
        self._events: deque[StreamEvent] = deque()
        self._decoders: dict[int, IncrementalDecoder] = {}
        self._errors: list[SpecwireError] = []

    def __aiter__(self) -> "AsyncTokenStream":
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event.

        Raises:
            SpecwireError: the generation failed; with n > 1 only if all of its choices did.
            FailedPreconditionError: it is read in another event loop or process than before, or by two tasks at once.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._home is None:
            self._home = Home("the stream")
        self._home.check()
        if self._is_reading:
            raise FailedPreconditionError("another task reads this stream; read it from one, or make one stream for each")
        self._is_reading = True
        try:
            if not self._events:
                async with self._deadline.limit():
                    await self._read()
            return self._events.popleft()
        except BaseException:
            self._leave()
            raise
        finally:
            self._is_reading = False

    async def aclose(self) -> None:
        """Ends the generation, if it still runs; may be called again."""
        self._leave()

    async def __aenter__(self) -> "AsyncTokenStream":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def __del__(self) -> None:
        # What `break` leaves behind: collected by whatever thread dropped it last.
        if not self._closed and self._generation is not None and self._home is not None:
            self._home.call_soon(self._generation.live.cancel)

    def _leave(self) -> None:
        if not self._closed and self._generation is not None and self._home is not None:
            self._home.call(self._generation.live.cancel)
        self._closed = True

    async def _read(self) -> None:
        """Adds at least one event, or raises StopAsyncIteration at the end."""
        if self._generation is None:
            self._generation = await self._begin()
            deltas = self._generation.first
        else:
            deltas = await self._generation.live.read()
        if not deltas:
            if len(self._errors) == self._generation.params.n:
                raise self._errors[0]
            raise StopAsyncIteration
        for delta in deltas:
            event = self._event(delta, self._generation)
            if event.error is not None:
                self._errors.append(event.error)
            self._events.append(event)

    def _event(self, delta: ChoiceDelta, generation: Generation) -> StreamEvent:
        return StreamEvent(
            index=delta.index,
            token_ids=delta.token_ids,
            origins=_origins(delta),
            pieces=self._pieces(delta, generation),
            logprobs=delta.logprobs,
            finish_reason=None if delta.finish_reason is None else delta.finish_reason.label,
            stop_cause=delta.stop_cause,
            usage=delta.usage,
            spec=delta.spec_stats,
            error=_error(delta),
        )

    def _pieces(self, delta: ChoiceDelta, generation: Generation) -> tuple[str, ...] | None:
        if generation.params.stop:
            return ("",) * (len(delta.token_ids) - 1) + (delta.text or "",)
        if generation.tokenizer is None:
            return None
        decoder = self._decoders.get(delta.index)
        if decoder is None:
            decoder = self._decoders[delta.index] = generation.tokenizer.incremental_decoder()
        shown_ids = _shown_ids(delta)
        pieces = [decoder.push(token_id) for token_id in shown_ids] + [""] * (len(delta.token_ids) - len(shown_ids))
        if delta.finish_reason is not None:
            rest = decoder.flush()
            pieces[-1:] = ["".join(pieces[-1:]) + rest]
        return tuple(pieces)


async def read_result(generation: Generation) -> GenerationResult:
    """Waits for the end of a generation that was started whole.

    Raises:
        SpecwireError: it failed; with n > 1 only if all choices did.
    """
    try:
        await generation.live.read()  # raises if the request failed after some of its choices
    finally:
        generation.live.cancel()
    choices = [_choice(delta, generation) for delta in sorted(generation.first, key=lambda delta: delta.index)]
    failures = [choice.error for choice in choices if choice.error is not None]
    if len(failures) == generation.params.n:
        raise failures[0]
    return GenerationResult(generation.prompt_token_ids, choices)


def _choice(delta: ChoiceDelta, generation: Generation) -> Choice:
    if delta.finish_reason is None:
        raise InternalError(f"choice {delta.index} ended without a finish reason")
    if generation.params.stop:
        text: str | None = delta.text or ""
    else:
        text = None if generation.tokenizer is None else generation.tokenizer.decode(_shown_ids(delta))
    return Choice(
        index=delta.index,
        token_ids=delta.token_ids,
        origins=_origins(delta),
        finish_reason=delta.finish_reason.label,
        stop_cause=delta.stop_cause,
        logprobs=delta.logprobs,
        usage=delta.usage or Usage(len(generation.prompt_token_ids), 0, len(delta.token_ids)),
        spec=delta.spec_stats or SpecStats(),
        decoded=text,
        error=_error(delta),
    )


def _shown_ids(delta: ChoiceDelta) -> list[int]:
    """The ids that have text: all but an EOS or stop id that ended the choice."""
    ended_by_id = delta.finish_reason is FinishReason.STOP and isinstance(delta.stop_cause, int)
    return delta.token_ids[:-1] if ended_by_id else delta.token_ids


def _origins(delta: ChoiceDelta) -> tuple[TokenOrigin, ...]:
    try:
        return tuple(_ORIGINS[value] for value in delta.token_origins)
    except KeyError as error:
        raise InternalError(f"the coordinator sent token origin {error.args[0]}, which this client does not know; install its version") from None


def _error(delta: ChoiceDelta) -> SpecwireError | None:
    return None if delta.error is None else error_from_status(delta.error)
