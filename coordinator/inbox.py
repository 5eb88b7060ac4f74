"""A verifier's messages, read as they come and taken by the step."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from specwire.errors import InternalError, SpecwireError
from specwire.messages import VerifyResult

from .peers import VerifyStream

logger = logging.getLogger(__name__)


class Inbox:
    """Answers of one stream after the other.

    Args:
        on_news: called after every message and at the end of a stream.
        on_draining: called when the verifier says that it is about to stop.

    Attributes:
        answers: what nobody has taken yet, with the time.monotonic_ns() of its coming.
    """

    def __init__(self, on_news: Callable[[], None], on_draining: Callable[[], None]) -> None:
        self.answers: deque[tuple[int, VerifyResult]] = deque()
        self._on_news = on_news
        self._on_draining = on_draining
        self._end: SpecwireError | None = None
        self._reader: asyncio.Task[None] | None = None

    def open(self, stream: VerifyStream) -> None:
        """Begins to read a stream whose welcome was taken."""
        self._reader = asyncio.create_task(self._read(stream))

    def close(self) -> None:
        """Forgets the stream and what it has brought."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        self._end = None
        self.answers.clear()

    def fail(self, error: SpecwireError) -> None:
        """Ends the stream for a reason of the coordinator's own."""
        self._end = error
        self._on_news()

    def check(self) -> None:
        """Raises what the stream ended with, once all answers before that are taken."""
        if self._end is not None and not self.answers:
            raise self._end

    async def _read(self, stream: VerifyStream) -> None:
        try:
            while True:
                result = await stream.receive()
                if result.draining and result.round:
                    raise InternalError(f"it says that it is about to stop in the answer to round {result.round}, not in a message of its own")
                if result.draining:
                    self._on_draining()
                else:
                    self.answers.append((time.monotonic_ns(), result))
                self._on_news()
        except SpecwireError as error:
            self._end = error
        except Exception as error:
            logger.exception("a fault in reading from a verifier")
            self._end = InternalError(f"{type(error).__name__}: {error}")
        self._on_news()
