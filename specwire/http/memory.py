"""What large bodies take: at any time together, and of the process once they are gone."""

import asyncio
import ctypes
import logging

from specwire.http.failures import DEFAULT_RETRY_S, Refusal

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
"""From here on a body counts."""
_NUM_FULL_BODIES = 16
_TRIM_AFTER_S = 0.5
"""Behind the last answer to a large body: its objects are gone by then, and several bodies are one case."""


class BodyMemory:
    """The large bodies that have come and are not answered yet.

    Args:
        max_body_bytes: largest body of a request; all large ones together may have 16 times as many.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = _NUM_FULL_BODIES * max_body_bytes
        self._num_bytes = 0
        self._trim: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all that have come and are not answered."""
        return self._num_bytes

    def grow(self, earlier: int, num_bytes: int) -> None:
        """A body grows from `earlier` to `num_bytes`.

        Raises:
            Refusal: all together are too much; what the body had counts until `release`.
        """
        more = _counted(num_bytes) - _counted(earlier)
        if more and self._num_bytes + more > self._max_bytes:
            text = f"bodies of {self._num_bytes} bytes wait for their answers, and all together may have {self._max_bytes}"
            remedy = "send it again later, in smaller requests, or raise max_body_mb"
            raise Refusal(f"{text}; {remedy}", status=429, kind="rate_limit_error", code="overloaded", retry_after_ms=1000 * DEFAULT_RETRY_S)
        self._num_bytes += more

    def release(self, num_bytes: int) -> None:
        """A body of so many bytes was answered."""
        if _counted(num_bytes):
            self._num_bytes -= num_bytes
            if self._trim is not None:
                self._trim.cancel()
            self._trim = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._begin_trim)

    def _begin_trim(self) -> None:
        self._trim = None
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.create_task(asyncio.to_thread(give_back))


def give_back() -> None:
    """Returns freed memory to the system. The C library keeps what lies below anything still in use: after a few prompts of 15 MB, 1.5 GB for
    good. Takes about a millisecond for each 10 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        logger.debug("the C library can't give memory back")
        return
    trim(0)


def _counted(num_bytes: int) -> int:
    return num_bytes if num_bytes >= LARGE_BYTES else 0
