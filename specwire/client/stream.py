"""One generation as its user sees it: events with text as they come, or everything at the end."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from specwire.client.results import Choice, GenerationResult, StreamEvent
from specwire.client.session import LiveRequest
from specwire.errors import DeadlineExceededError, InternalError, InvalidArgumentError, SpecwireError
from specwire.messages import ChoiceDelta, FinishReason, SpecStats, TokenOrigin, Usage
from specwire.rpc import error_from_code
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import IncrementalDecoder, Tokenizer

_ORIGINS = {origin.value: origin for origin in TokenOrigin}


@dataclass(frozen=True, slots=True)
class Generation:
    """A started generation and what its results are made with."""

    prompt_token_ids: list[int]
    params: SamplingParams
    live: LiveRequest
    tokenizer: "Tokenizer | None"


class Deadline:
    """A number of seconds from now, or none. Raises InvalidArgumentError for a number that is not positive."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and not 0 < timeout < float("inf"):
            raise InvalidArgumentError(f"timeout is {timeout}, but must be a positive number of seconds; None waits without limit")
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def remaining_ms(self) -> int | None:
        """What is left of it, at least 1."""
        return None if self._end is None else max(1, round(1000 * (self._end - time.monotonic())))

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises DeadlineExceededError in its body when the deadline passes."""
        if self._end is None:
            yield
            return
        try:
            async with asyncio.timeout(self._end - time.monotonic()):
                yield
        except SpecwireError:
            raise
        except TimeoutError:
            raise DeadlineExceededError(f"the generation did not end within {self._timeout:g} s; raise timeout or lower max_tokens") from None


class AsyncTokenStream:
    """An asynchronous iterator over a generation's events, sent off by the first read. A reader that falls behind gets longer events.

    Leaving it early in any way (break, an exception, the task's cancellation, `aclose`, `async with`) ends the generation.
    """

    def __init__(self, begin: Callable[[], Awaitable[Generation]], deadline: Deadline) -> None:
        self._begin = begin
        self._deadline = deadline
        self._generation: Generation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
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
        """
        if self._closed:
            raise StopAsyncIteration
        try:
            if not self._events:
                async with self._deadline.limit():
                    await self._read()
            return self._events.popleft()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Ends the generation, if it still runs; may be called again."""
        self._closed = True
        if self._generation is not None:
            self._generation.live.cancel()

    async def __aenter__(self) -> "AsyncTokenStream":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # What `break` leaves behind: collected by whatever thread dropped it last.
        if not self._closed and self._generation is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has gone, and the connection with it
                self._loop.call_soon_threadsafe(self._generation.live.cancel)

    async def _read(self) -> None:
        """Adds at least one event, or raises StopAsyncIteration at the end."""
        if self._generation is None:
            self._loop = asyncio.get_running_loop()
            self._generation = await self._begin()
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
        deltas = await generation.live.read()
        await generation.live.read()  # raises if the request failed after some of its choices
    finally:
        generation.live.cancel()
    choices = [_choice(delta, generation) for delta in sorted(deltas, key=lambda delta: delta.index)]
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
    return None if delta.error is None else error_from_code(delta.error.code, delta.error.message)
