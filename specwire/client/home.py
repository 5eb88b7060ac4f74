"""Where something asynchronous lives: it works in one event loop of one process only, and says so elsewhere."""

import asyncio
import contextlib
import os
from collections.abc import Callable

from specwire.errors import FailedPreconditionError

_FORK_REMEDY = "start processes by spawn (multiprocessing.get_context('spawn')), or fork before the first call of the first client"


class _FirstUse:
    """Which process uses gRPC: its threads do not survive a fork, so that nothing works in a child of a process that has used it."""

    def __init__(self) -> None:
        self._pid: int | None = None

    @property
    def was_before_fork(self) -> bool:
        """Whether a parent of this process used it before this one was forked."""
        return self._pid is not None and self._pid != os.getpid()

    def note(self) -> None:
        """A channel is about to be opened. Raises FailedPreconditionError where it can't work."""
        if self.was_before_fork:
            text = f"process {self._pid} used a client before this process was forked from it, and gRPC does not work after that"
            raise FailedPreconditionError(f"{text}; {_FORK_REMEDY}")
        self._pid = os.getpid()


GRPC_USE = _FirstUse()
"""One of the process, as gRPC's own state is."""


def forked_error(owner: str) -> FailedPreconditionError:
    """For the use of something that was made before a fork: a new one helps if nothing was used by then."""
    remedy = f"gRPC was used before it too: {_FORK_REMEDY}" if GRPC_USE.was_before_fork else "make a new one in this process"
    return FailedPreconditionError(f"{owner} was made before a fork; {remedy}")


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
            raise forked_error(self._owner)
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
