"""A client's connection: cut when the client has read nothing of its answer for too long, or does not say all of what it wants."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from specwire.degraded_log import DegradedLog

logger = logging.getLogger(__name__)

_HEADERS_S = 30.0
"""What a client may take until the headers of a request are there: whoever says nothing, or a byte at a time, holds a descriptor."""


_INVALID = "Invalid HTTP request received."


def leave_refusals_to_connections() -> None:
    """Uvicorn's line about bytes that are no request, for each of them and without a remedy, gives way to `Connection`'s."""
    logging.getLogger("uvicorn.error").addFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    return record.msg != _INVALID


class Parser:
    """The library's parser, for a server that speaks HTTP/1.1 alone: a request that asks for another protocol is one like others, body included,
    which the library leaves to whoever takes the connection over. Java's client asks for HTTP/2 so, and curl --http2.

    Args:
        connection: gets what is parsed; it ignores the head of a request while `is_asked_to_upgrade`, which then comes again without the wish.
    """

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._begin()

    def feed_data(self, data: bytes) -> None:
        """Raises httptools' errors."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.is_asked_to_upgrade:
                    raise httptools.HttpParserError("CONNECT is for proxies") from None
                data = self._head() + data[upgrade.args[0] :]
            self._begin()

    @property
    def is_asked_to_upgrade(self) -> bool:
        """By the request whose head was parsed last; CONNECT is no wish, and refused."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def _begin(self) -> None:
        parser = self._parser = httptools.HttpRequestParser(self._connection)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own one
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_keep_alive, self.should_upgrade = parser.should_keep_alive, parser.should_upgrade

    def _head(self) -> bytes:
        """Of the request whose head was parsed last, without its wish."""
        first = b"%b %b HTTP/%b" % (self.get_method(), self._connection.url, self.get_http_version().encode())
        lines = [name + b": " + value for name, value in self._connection.headers if name != b"upgrade"]
        return b"\r\n".join([first, *lines, b"", b""])


class Connection(HttpToolsProtocol):
    """Uvicorn's, with an end to waiting. An answer waits once 64 KiB of it lie here and the system's buffers are full, too.

    Args:
        stall_s: how long it waits, and how long nothing may come of a body that has begun.
        on_stall: called when it has waited for so long; then the client is gone as if it had hung up.
        log: of all connections, for what clients may repeat.
        others: uvicorn's.
    """

    def __init__(self, *, stall_s: float, on_stall: Callable[[], None], log: DegradedLog, **others: Any) -> None:
        super().__init__(**others)
        self.parser: Parser = Parser(self)  # type: ignore[assignment]
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._log = log
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
        if self.parser.is_asked_to_upgrade:
            return
        self._stop_asking()
        super().on_headers_complete()
        self._heard_at = self.loop.time()
        self._wait_for_body(self._stall_s)

    def on_body(self, body: bytes) -> None:
        self._heard_at = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.is_asked_to_upgrade:
            return
        self._stop_sending()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        remedy = "a gRPC client needs the coordinator's port, not this one, and both sides must use TLS, or neither"
        self._log.warning("refused", "what %s sent is no HTTP/1.1 request for this service, and was answered with 400; " + remedy, self.client)
        super().send_400_response(msg)

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

    def _give_up(self) -> None:
        logger.info("the connection of %s is cut: it has sent no whole request within %g s", self.client, _HEADERS_S)
        self.transport.abort()

    def _cut(self) -> None:
        logger.warning("the connection of %s is cut: it has read nothing of its answer for %g s", self.client, self._stall_s)
        self._on_stall()
        self.transport.abort()
