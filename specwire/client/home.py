"""Where something asynchronous lives: it works in one event loop of one process only, and says so elsewhere."""

import asyncio
import contextlib
import os
from collections.abc import Callable

from specwire.errors import FailedPreconditionError


class Home:
    """The running event loop and process at its making.

    Args:
        owner: what lives here, for messages: "the client".
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in this loop of this process."""
        return self._pid == os.getpid() and self._loop is asyncio._get_running_loop()

    def check(self) -> None:
        """Raise FailedPreconditionError if the caller does not run here."""
        if self._pid != os.getpid():
            raise FailedPreconditionError(f"{self._owner} was used before a fork; make a new one in this process")
        if self._loop is not asyncio.get_running_loop():
            raise FailedPreconditionError(f"{self._owner} belongs to another event loop; make one per loop")

    def call(self, callback: Callable[[], object]) -> None:
        """Calls it in this loop: at once if the caller runs here, else soon."""
        if self.is_here:
            callback()
        else:
            self.call_soon(callback)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls it in this loop soon, for callers in any thread and for finalizers, which may run in the middle of anything. Never after a fork."""
        if self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop has gone, and everything that lived in it
                self._loop.call_soon_threadsafe(callback)
