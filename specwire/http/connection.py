"""A client's connection: cut when the client has read nothing of its answer for too long, or does not say all of what it wants."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

_HEADERS_S = 30.0
"""What a client may take until the headers of a request are there: whoever says nothing, or a byte at a time, holds a descriptor."""


class Connection(HttpToolsProtocol):
    """Uvicorn's, with an end to waiting. An answer waits once 64 KiB of it lie here and the system's buffers are full, too.

    Args:
        stall_s: how long it waits, and how long nothing may come of a body that has begun.
        on_stall: called when it has waited for so long; then the client is gone as if it had hung up.
        others: uvicorn's.
    """

    def __init__(self, *, stall_s: float, on_stall: Callable[[], None], **others: Any) -> None:
        super().__init__(**others)
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._stalled: asyncio.TimerHandle | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._heard_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # The beginning of a further request: with its first byte uvicorn has stopped to count the time that the connection is idle.
        if self._asking is None and self.timeout_keep_alive_task is None and self.cycle is not None and self.cycle.response_complete:
            self._wait_for_headers()

    def on_headers_complete(self) -> None:
        self._stop_asking()
        super().on_headers_complete()
        self._heard_at = self.loop.time()
        self._wait_for_body(self._stall_s)

    def on_body(self, body: bytes) -> None:
        self._heard_at = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_sending()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stall_s, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._stop_asking()
        self._stop_sending()
        if isinstance(exc, TimeoutError):  # the system has waited for longer still
            self._on_stall()

    def _stop_waiting(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _wait_for_headers(self) -> None:
        self._asking = self.loop.call_later(_HEADERS_S, self._give_up)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _wait_for_body(self, seconds: float) -> None:
        self._stop_sending()
        self._sending = self.loop.call_later(seconds, self._check_body)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _check_body(self) -> None:
        if self.flow.read_paused or self.pipeline:  # nobody has taken its beginning yet, or it lies behind one that is being answered
            self._heard_at = self.loop.time()
        left_s = self._heard_at + self._stall_s - self.loop.time()
        if left_s > 0:
            self._wait_for_body(left_s)
            return
        logger.warning("the connection of %s is cut: it has sent nothing of the rest of a request for %g s", self.client, self._stall_s)
        self._on_stall()
        self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Uvicorn's would have the reader install what is not wanted here."""
        logger.debug("%s asks for another protocol than HTTP/1.1; it is answered in that", self.client)

    def _give_up(self) -> None:
        logger.info("the connection of %s is cut: it has sent no whole request within %g s", self.client, _HEADERS_S)
        self.transport.abort()

    def _cut(self) -> None:
        logger.warning("the connection of %s is cut: it has read nothing of its answer for %g s", self.client, self._stall_s)
        self._on_stall()
        self.transport.abort()
