"""Many prompts at once: results as they end, and never more on the way than the coordinator takes."""

import asyncio
import functools
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import TypeAlias

from specwire.client.generation import is_full
from specwire.client.home import Home
from specwire.client.results import GenerationResult
from specwire.errors import FailedPreconditionError, SpecwireError

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S = 0.01

Outcome: TypeAlias = GenerationResult | SpecwireError
Run: TypeAlias = Callable[[], Awaitable[GenerationResult]]
"""Generates for one prompt; called again if the coordinator had no room for it."""


class AsyncBatch:
    """An asynchronous iterator over (index of the prompt, its result or its error), in the order in which they end.

    Prompts are sent while it is read: at most `max_concurrency` run, or have ended and wait for the reader. One that the coordinator refuses
    for want of room comes back to the front of those that wait, and fewer run until some have ended. Leaving the batch early in any way (break,
    an exception, the task's cancellation, `aclose`, `async with`) ends what runs.

    Args:
        runs: one for each prompt, in order.
        check: raises if nothing can be sent from here.
        max_concurrency: at least 1.
    """

    def __init__(self, runs: Iterable[Run], check: Callable[[], object], max_concurrency: int) -> None:
        self._running: dict[asyncio.Task[Outcome], tuple[int, Run]] = {}
        self._home: Home | None = None
        self._waiting = deque(enumerate(runs))
        self._check = check
        self._max_concurrency = max_concurrency
        self._limit = float(max_concurrency)
        self._ended: asyncio.Queue[asyncio.Task[Outcome]] = asyncio.Queue()
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
            while self._waiting or self._running:
                await self._send()
                if not self._running:  # it was closed meanwhile
                    continue
                task = await self._ended.get()
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
        if self._running and self._home is not None:
            self._home.call_soon(functools.partial(_cancel, list(self._running)))

    async def _send(self) -> None:
        """Sends what there is room for."""
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
            self._pause_s = 0.0
        while self._waiting and len(self._running) < int(self._limit):
            self._check()
            index, run = self._waiting.popleft()
            task = asyncio.create_task(_outcome(run))
            # Not a method of this object: a batch that nobody reads any more must be collected although its tasks run.
            task.add_done_callback(self._ended.put_nowait)
            self._running[task] = index, run

    def _refused(self, job: tuple[int, Run], error: SpecwireError) -> None:
        """As many as run now are what the coordinator takes; if none do, others fill its queue, and it says when to ask again."""
        logger.debug("prompt %d of a batch waits for room: %s", job[0], error)
        self._waiting.appendleft(job)
        self._limit = max(1.0, len(self._running))
        if not self._running:
            self._pause_s = random.uniform(1.0, 1.5) * max((error.retry_after_ms or 0) / 1000, _LEAST_PAUSE_S)

    def _leave(self) -> None:
        self._waiting.clear()
        running, self._running = self._running, {}
        if running and self._home is not None:
            self._home.call(functools.partial(_cancel, list(running)))


def _cancel(tasks: list[asyncio.Task[Outcome]]) -> None:
    for task in tasks:
        task.cancel()


async def _outcome(run: Run) -> Outcome:
    try:
        return await run()
    except SpecwireError as error:
        return error
