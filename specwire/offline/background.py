"""The services of a stack in the background of a program: started from any thread, kept running, and gone when the program is."""

import asyncio
import collections
import logging
import os
import tempfile
import threading
import weakref
from pathlib import Path

from specwire.errors import FailedPreconditionError, UnavailableError
from specwire.launch import Supervisor
from specwire.offline.waiting import wait_with_notices
from specwire.socket_folder import socket_folder
from specwire.stack.plan import StackOptions, plan_private_stack

logger = logging.getLogger(__name__)

_NUM_LAST_LINES = 8


class BackgroundStack:
    """Runs the services of a stack on an event loop of its own, in a daemon thread.

    They stop at `close`, when this is collected, or when the program ends, in whatever way: each of them dies with this process.

    Args:
        options: what to start.

    Raises:
        UnavailableError: a service does not start; nothing runs then. It has the service's last lines.
    """

    def __init__(self, options: StackOptions) -> None:
        folder = socket_folder("specwire-")
        stack = plan_private_stack(options, Path(folder.name))
        self.address = stack.private_address
        self._lines = _LastLines()
        self._keeper = _Keeper(Supervisor(stack.groups(), self._lines.take, startup_timeout_s=options.up.startup_timeout_s))
        self._pid = os.getpid()
        loop = asyncio.new_event_loop()
        # Children die with the thread that starts them: this one lives until all of them have ended.
        thread = threading.Thread(target=_run, args=(loop, folder), name="specwire-services", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._keeper, loop, thread, self._pid)
        try:
            wait_with_notices(asyncio.run_coroutine_threadsafe(self._keeper.start(), loop), self._describe_start)
        except UnavailableError as error:
            self.close()
            raise UnavailableError(f"{error}{self._lines}") from None
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run, by the services' names."""
        services = [service for group in self._keeper.supervisor.groups for service in group]
        return {service.spec.name: service.pid for service in services if service.pid is not None}

    def check(self) -> None:
        """Raises what there is to say if the services do not run (any more).

        Raises:
            FailedPreconditionError: they were stopped, or belong to another process.
            UnavailableError: one ended that is not restarted.
        """
        if os.getpid() != self._pid:
            raise FailedPreconditionError("the services belong to the process that this one was forked from; make a new LLM in each process")
        if not self._finalizer.alive:
            raise FailedPreconditionError("the services were stopped; make a new LLM")
        if (error := self._keeper.failure) is not None:
            raise UnavailableError(f"{error}; close this LLM and make a new one{self._lines}") from error

    def _describe_start(self) -> str:
        awaited, last = self._keeper.supervisor.awaited, self._lines.last
        return f"waiting for the {awaited or 'services'}{f'; last line: {last}' if last else ''}"

    def close(self) -> None:
        """Stops the services in order and waits for their end; may be called again. A Ctrl-C meanwhile kills them."""
        self._finalizer()


class _Keeper:
    """Starts, watches and stops the services, all on one loop. Knows nothing of who has started it, so that one can be collected."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._task: asyncio.Task[None] | None = None
        self._stops = False

    @property
    def failure(self) -> BaseException | None:
        """Why the services are watched no more, if not because they were stopped."""
        return self._task.exception() if self._task is not None and self._task.done() and not self._task.cancelled() else None

    async def start(self) -> None:
        self._task = asyncio.create_task(self.supervisor.start())
        await self._task
        if not self._stops:
            self._task = asyncio.create_task(self.supervisor.watch())

    async def stop(self) -> None:
        self._stops = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.supervisor.stop()


class _LastLines:
    """Takes the services' log lines: for debugging, and the last ones for messages."""

    def __init__(self) -> None:
        self._last: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)

    def take(self, name: str, line: str) -> None:
        logger.debug("%s | %s", name, line)
        self._last.append(f"{name} | {line}")

    @property
    def last(self) -> str:
        """Empty if there is none."""
        return self._last[-1] if self._last else ""

    def __str__(self) -> str:
        return "".join(f"\n  {line}" for line in self._last)


def _run(loop: asyncio.AbstractEventLoop, folder: "tempfile.TemporaryDirectory[str]") -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
        folder.cleanup()


def _shut_down(keeper: _Keeper, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """Runs once, in whatever thread."""
    if os.getpid() != pid or not thread.is_alive():
        return
    stopping = asyncio.run_coroutine_threadsafe(keeper.stop(), loop)
    stopping.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is thread:  # the collector may run anywhere
        return
    try:
        thread.join()
    except BaseException:
        loop.call_soon_threadsafe(keeper.supervisor.kill)
        thread.join()
        raise
