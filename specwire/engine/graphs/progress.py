"""Says how far a long start is."""

import logging
import time
from collections.abc import Callable


def log_progress(logger: logging.Logger, what: str, interval_s: float = 2.0) -> Callable[[int, int], None]:
    """A function of (done, total) that logs them, `interval_s` after its last line at the earliest."""
    due = time.monotonic() + interval_s

    def log(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + interval_s
            logger.info("%s: %d of %d", what, done, total)

    return log
