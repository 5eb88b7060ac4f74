"""How asyncio learns that a child process has ended: without a thread for each."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVarTuple

logger = logging.getLogger(__name__)

_Ts = TypeVarTuple("_Ts")


def watch_children_without_threads() -> None:
    """Has this process's asyncio wait for children by file descriptors, where it would have a thread wait for each, and the kernel can.

    Python 3.11 starts a child and its thread then: where that can't be, for a limit of threads, the child runs and nobody knows of it. From
    Python 3.12 on asyncio does as here.
    """
    if sys.version_info >= (3, 12) or sys.platform != "linux":
        return
    policy = asyncio.get_event_loop_policy()
    # Other policies and watchers are somebody's choice.
    if isinstance(policy, asyncio.DefaultEventLoopPolicy) and type(policy.get_child_watcher()) is asyncio.ThreadedChildWatcher and _has_pidfd():
        policy.set_child_watcher(_PidfdWatcher())


if sys.version_info < (3, 12) and sys.platform == "linux":

    class _PidfdWatcher(asyncio.AbstractChildWatcher):
        """Serves the children of all loops. asyncio's own of these versions serves one loop, and whoever runs another takes it away."""

        def add_child_handler(self, pid: int, callback: Callable[[int, int, *_Ts], object], *args: *_Ts) -> None:
            loop = asyncio.get_running_loop()
            descriptor = os.pidfd_open(pid)
            loop.add_reader(descriptor, _reap, loop, descriptor, pid, callback, args)

        def remove_child_handler(self, pid: int) -> bool:
            return False  # asyncio calls it only for watchers that it attaches to a loop

        def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
            pass

        def close(self) -> None:
            pass

        def is_active(self) -> bool:
            return True

        def __enter__(self) -> "_PidfdWatcher":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def _reap(loop: asyncio.AbstractEventLoop, descriptor: int, pid: int, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:
            code = 255  # asyncio's own number
            logger.warning("somebody else has waited for process %d: how it ended isn't known", pid)
        callback(pid, code, *args)

    def _has_pidfd() -> bool:
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:  # the kernel, or what confines this process, doesn't allow it
            logger.info("a thread waits for each child process, since there are no file descriptors of processes here (%s)", error)
            return False
        return True
