"""Ends a run in time, so that it can go on later."""

import time


class TimeUp(Exception):
    """The seconds of this run are over; everything that is worth it is saved."""


class Deadline:
    """A point in time.

    Args:
        max_seconds: from now on; 0 = never.
    """

    def __init__(self, max_seconds: float) -> None:
        self._end = time.monotonic() + max_seconds if max_seconds else None

    @property
    def is_over(self) -> bool:
        """Whether it has come."""
        return self._end is not None and time.monotonic() >= self._end

    def check(self) -> None:
        """Raises TimeUp once it has come."""
        if self.is_over:
            raise TimeUp
