"""A client's connection: cut when the client has read nothing of its answer for too long."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """Uvicorn's, with an end to waiting. An answer waits once 64 KiB of it lie here and the system's buffers are full, too.

    Args:
        stall_s: how long it waits.
        on_stall: called when it has waited for so long; then the client is gone as if it had hung up.
        others: uvicorn's.
    """

    def __init__(self, *, stall_s: float, on_stall: Callable[[], None], **others: Any) -> None:
        super().__init__(**others)
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stall_s, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        if isinstance(exc, TimeoutError):  # the system has waited for longer still
            self._on_stall()

    def _stop_waiting(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cut(self) -> None:
        logger.warning("the connection of %s is cut: it has read nothing of its answer for %g s", self.client, self._stall_s)
        self._on_stall()
        self.transport.abort()
