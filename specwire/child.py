"""Runs a module in a process that dies with its parent: `python -m specwire.child PARENT_PID MODULE [ARGUMENT...]`."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Asks the kernel to kill this process when the parent ends, however it ends, and becomes the module."""
    parent, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"{module} not started: its parent, process {parent}, has ended")
    # The request outlives exec, and the module runs as if it had been started by hand.
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
