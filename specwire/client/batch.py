"""Many prompts at once: results as they end, and never more on the way than the coordinator takes."""

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from specwire.client.arguments import Prompts
from specwire.client.generation import is_full, pause_before_retry
from specwire.client.home import Home
from specwire.client.prompts import BatchItem, Prompt
from specwire.client.results import GenerationResult
from specwire.errors import FailedPreconditionError, SpecwireError

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S = 0.01
_NONE = object()

Outcome: TypeAlias = GenerationResult | SpecwireError
Item: TypeAlias = Prompt | BatchItem
Run: TypeAlias = Callable[[int, Item], Awaitable[GenerationResult]]
"""Generates for the prompt of an index; called again if the coordinator had no room for it."""
Read = TypeVar("Read")


class AsyncBatch:
    """An asynchronous iterator over (index of the prompt, its result or its error), in the order in which they end.

    Prompts are taken and sent while it is read: at most `max_concurrency` run, or have ended and wait for the reader. One that the coordinator
    refuses for want of room comes back to the front of those that wait, and fewer run until some have ended. Leaving the batch early in any way
    (break, an exception, the task's cancellation, `aclose`, `async with`) ends what runs.

    Args:
        prompts: in order.
        run: starts one.
        check: raises if nothing can be sent from here.
        max_concurrency: at least 1.
    """

    def __init__(self, prompts: Prompts, run: Run, check: Callable[[], object], max_concurrency: int) -> None:
        self._running: dict[asyncio.Task[Outcome], tuple[int, Item]] = {}
        self._home: Home | None = None
        self._source = aiter(prompts) if isinstance(prompts, AsyncIterable) else iter(prompts)
        self._run = run
        self._fetching: asyncio.Task[Any] | None = None
        self._num_taken = 0
        self._has_more = True
        self._waiting: deque[tuple[int, Item]] = deque()
        self._check = check
        self._max_concurrency = max_concurrency
        self._limit = float(max_concurrency)
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._is_reading = False
        self._pause_s = 0.0

    def __aiter__(self) -> "AsyncBatch":
        return self

    async def __anext__(self) -> tuple[int, Outcome]:
        """The next result or error; errors of the generations are returned, not raised.

        Raises:
            FailedPreconditionError: the client was closed, or the batch belongs elsewhere.
        """
        if self._home is None:
            self._home = Home("the batch")
        self._home.check()
        if self._is_reading:
            raise FailedPreconditionError("another task reads this batch; read it from one, or make one batch for each")
        self._is_reading = True
        try:
            while self._waiting or self._running or self._has_more:
                await self._send()
                if not self._running and self._fetching is None:  # there was nothing more, or it was closed meanwhile
                    continue
                task = await self._ended.get()
                if task is self._fetching:
                    self._fetching = None
                    self._take(task.result())
                if task not in self._running:
                    continue
                job, outcome = self._running.pop(task), task.result()
                if isinstance(outcome, SpecwireError) and is_full(outcome):
                    self._refused(job, outcome)
                    continue
                self._limit = min(self._limit + 1 / self._limit, self._max_concurrency)
                return job[0], outcome
            raise StopAsyncIteration
        except BaseException:
            self._leave()
            raise
        finally:
            self._is_reading = False

    async def aclose(self) -> None:
        """Ends what runs and drops what waits; may be called again."""
        self._leave()

    async def __aenter__(self) -> "AsyncBatch":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def __del__(self) -> None:
        # What `break` leaves behind: collected by whatever thread dropped it last.
        tasks = self._tasks()
        if tasks and self._home is not None:
            self._home.call_soon(functools.partial(_cancel, tasks))

    async def _send(self) -> None:
        """Sends what there is room for."""
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
            self._pause_s = 0.0
        while len(self._running) < int(self._limit) and (self._waiting or self._fetch()):
            self._check()
            index, item = self._waiting.popleft()
            task = asyncio.create_task(_outcome(self._run, index, item))
            # Not a method of this object: a batch that nobody reads any more must be collected although its tasks run.
            task.add_done_callback(self._ended.put_nowait)
            self._running[task] = index, item

    def _fetch(self) -> bool:
        """Takes the next prompt, if there is one; whether it is there already."""
        if not self._has_more or self._fetching is not None:
            return False
        if not isinstance(self._source, AsyncIterator):
            self._take(next(self._source, _NONE))
            return self._has_more
        self._fetching = asyncio.create_task(_next(self._source))
        self._fetching.add_done_callback(self._ended.put_nowait)
        return False

    def _take(self, item: Any) -> None:
        """What the prompts gave; _NONE at their end."""
        if item is _NONE:
            self._has_more = False
            return
        self._waiting.append((self._num_taken, item))
        self._num_taken += 1

    def _refused(self, job: tuple[int, Item], error: SpecwireError) -> None:
        """As many as run now are what the coordinator takes; if none do, others fill its queue, and it says when to ask again."""
        logger.debug("prompt %d of a batch waits for room: %s", job[0], error)
        self._waiting.appendleft(job)
        self._limit = max(1.0, len(self._running))
        if not self._running:
            self._pause_s = pause_before_retry(error, max((error.retry_after_ms or 0) / 2000, _LEAST_PAUSE_S))

    def _leave(self) -> None:
        self._waiting.clear()
        self._has_more = False
        tasks = self._tasks()
        self._running, self._fetching = {}, None
        if tasks and self._home is not None:
            self._home.call(functools.partial(_cancel, tasks))

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [*self._running, *(() if self._fetching is None else (self._fetching,))]


async def read_in_thread(prompts: Iterable[Read]) -> AsyncIterator[Read]:
    """What an iterable gives, for those that may keep their next item waiting. Nobody waits for the thread in which one does."""
    iterator = iter(prompts)
    while (item := await _in_daemon_thread(functools.partial(next, iterator, _NONE))) is not _NONE:
        yield item


def _in_daemon_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """What the call returns or raises. Unlike one of an executor, the thread keeps neither the loop nor the program from ending."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(item: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(item)
        else:
            answer.set_exception(error)

    def run() -> None:
        item, error = None, None
        try:
            item = context.run(call)
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, item, error)

    threading.Thread(target=run, name="specwire-prompts", daemon=True).start()
    return answer


def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


async def _outcome(run: Run, index: int, item: Item) -> Outcome:
    try:
        return await run(index, item)
    except SpecwireError as error:
        return error


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source, _NONE)
