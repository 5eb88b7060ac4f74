"""Uvicorn, as this service needs it: started and stopped by the service, which handles signals itself."""

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from specwire.degraded_log import DegradedLog
from specwire.errors import InternalError
from specwire.http.connection import Connection, leave_refusals_to_connections

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_LAST_WORDS_S = 2
"""What connections get at the end, in which nothing runs any more."""


class Site(NamedTuple):
    """An ASGI application, the bound sockets on which it is served, and the TLS of those; None = without."""

    app: ASGIApp
    sockets: Sequence[socket.socket]
    context: ssl.SSLContext | None = None


class WebServer:
    """Serves ASGI applications over HTTP/1.1.

    Args:
        sites: those without sockets are left out.
        keep_alive_s: how long idle connections are kept.
        stall_s: how long a client may read nothing of its answer.
        on_stall: called for each that is cut for it.
    """

    def __init__(self, sites: Sequence[Site], keep_alive_s: int, stall_s: float, on_stall: Callable[[], None]) -> None:
        leave_refusals_to_connections()
        connection = functools.partial(Connection, stall_s=stall_s, on_stall=on_stall, log=DegradedLog(logger))
        self._servers = []
        for site in sites:
            if site.sockets:
                config = _config(site, keep_alive_s)
                config.http_protocol_class = connection  # type: ignore[assignment]  # is called, and nothing else
                self._servers.append((_Server(config), list(site.sockets)))
            for bound in site.sockets:
                _limit_last_bytes(bound, stall_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens and serves. Raises InternalError if that fails."""
        for server, sockets in self._servers:
            task = asyncio.create_task(server.serve(sockets))
            self._tasks.append(task)
            starting = asyncio.create_task(server.has_started.wait())
            await asyncio.wait([task, starting], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                starting.cancel()
                raise InternalError("the HTTP server ended at its start") from task.exception()

    async def stop(self) -> None:
        """Closes all connections."""
        for server, _ in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._tasks)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them to the service."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


def _limit_last_bytes(bound: socket.socket, stall_s: float) -> None:
    """What is left in the system's buffers when an answer has ended is given up, too, if its client never reads it (Linux; tcp(7))."""
    if bound.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(2**31 - 1, round(4000 * stall_s)))


def _config(site: Site, keep_alive_s: int) -> uvicorn.Config:
    config = uvicorn.Config(
        site.app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    config.load()
    config.ssl = site.context  # one whose certificate can change
    return config
