"""The three files that every process expects to have."""

import fcntl
import os
import sys

_NAMES = "stdin", "stdout", "stderr"


def open_standard_files() -> None:
    """Opens those of stdin, stdout and stderr that were closed on the null device; before anything else is opened. Otherwise files and
    sockets would get their numbers: what is printed would go there, and uvloop ends a process that closes one of them."""
    for number, name in enumerate(_NAMES):
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:
            # It gets the lowest number that is free: this one. Unlike other files, these are for children too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if number and getattr(sys, name) is None:  # sys.stdin stays None, so that what reads it can say that it is closed
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as the process
