"""Ctrl-C while the command line is still being imported."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process at once, as it does any program without a handler: Python's own would show where it was. One that is ignored (in the
    background of a shell, say) stays so."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
