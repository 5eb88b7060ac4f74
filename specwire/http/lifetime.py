"""How requests end before their time: the client leaves, or the process is about to stop."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from specwire.errors import UnavailableError

Result = TypeVar("Result")

_STOPPED = "the HTTP service stops, and its grace period is over; send the request again"


class ClientGoneError(Exception):
    """The client has hung up: nobody waits for an answer."""


class Lifetime:
    """What the requests of a process have in common: how many run, and whether they still may.

    Attributes:
        is_draining: the process is about to stop, and takes no new requests.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()

    def __enter__(self) -> None:
        """A request begins, which lasts to the end of the `with`."""
        self._num_running += 1
        self._idle.clear()

    def __exit__(self, *error: object) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests that have begun and not ended."""
        return self._num_running

    async def drain(self, grace_s: float) -> None:
        """Returns once no request runs: after grace_s at the latest, those that still do are ended with an error."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self._stop.set()
            await self._idle.wait()

    async def read(self, reading: Awaitable[Result]) -> Result:
        """What reading a request's body gives.

        Raises:
            UnavailableError: the process stops, and its grace period is over: the rest of the body may never come.
        """
        task, stopping = asyncio.ensure_future(reading), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise UnavailableError(_STOPPED)
        finally:
            task.cancel()
            stopping.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
        """What the work gives. It is cancelled when it is no longer wanted, and has ended when this returns.

        Args:
            receive: of the request, whose body was read.

        Raises:
            ClientGoneError: the client has left.
            UnavailableError: the process stops.
        """
        task = asyncio.create_task(work)
        leaving, stopping = asyncio.create_task(_gone(receive)), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, leaving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if leaving.done():
                raise ClientGoneError
            raise UnavailableError(_STOPPED)
        finally:
            for each in (task, leaving, stopping):
                each.cancel()
            await asyncio.gather(task, leaving, stopping, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
