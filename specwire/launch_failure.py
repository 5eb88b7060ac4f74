"""Why a process can't be started: which limit is reached, and what to do."""

import contextlib
import errno
import os
import resource
import sys
from pathlib import Path

from specwire.errors import UnavailableError

_NO_THREAD = "can't start new thread"
"""What Python's RuntimeError says; asyncio has a thread wait for each child where it has no file descriptors of processes."""
_CGROUPS = Path("/sys/fs/cgroup")


def explain_failed_start(name: str, error: OSError | RuntimeError) -> UnavailableError | None:
    """The error to raise for a service whose process could not be started; None if it is a fault of ours."""
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN if _NO_THREAD in str(error) else None
    if number is None:
        return None
    reason = os.strerror(number) if isinstance(error, OSError) else str(error)
    return UnavailableError(f"{name} can't be started ({reason}): {_remedy(number)}")


def _remedy(number: int) -> str:
    if number == errno.EAGAIN:
        group = _most_in_group()
        container = f", this container or session {group} (pids.max)" if group is not None else ""
        limits = f"this user may have {_limit(resource.RLIMIT_NPROC)} processes and threads (ulimit -u){container}"
        return f"{limits}; end other programs, raise the limit, or start fewer services"
    if number == errno.ENOMEM:
        return "there is no memory for another process; end other programs, or start fewer services"
    if number == errno.ENFILE:
        return "this system has all the open files that it may have (fs.file-max); end other programs, or raise the limit"
    if number == errno.EMFILE:
        return f"this process may have {_limit(resource.RLIMIT_NOFILE)} open files (ulimit -n); raise the limit, or start fewer services"
    return f"it is run by {sys.executable}; check that this user can read and run that file"


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "any number of" if soft == resource.RLIM_INFINITY else str(soft)


def _most_in_group() -> int | None:
    """The least pids.max of this process's control groups; None if there is none."""
    found: list[int] = []
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").split("0::", 1)[1].splitlines()[0]
        folder = _CGROUPS / own.lstrip("/")
        for each in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # "max", or a root without the file
                found.append(int((each / "pids.max").read_text(encoding="utf-8")))
    return min(found, default=None)
