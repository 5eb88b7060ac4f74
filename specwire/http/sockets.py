"""Sockets to serve on, and TLS on them."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from specwire.errors import SpecwireError, UnavailableError
from specwire.tls import FileWatch, ServerTls, read_ca, read_pair

logger = logging.getLogger(__name__)

_RELOAD_S = 1.0


def bind(address: str, *, is_shared: bool) -> socket.socket:
    """A socket on `host:port` or `unix:path` that does not listen yet.

    Args:
        is_shared: other processes bind the same port, and the kernel gives each connection to one of them.

    Raises:
        UnavailableError: the address can't be bound.
    """
    try:
        if address.startswith("unix:"):
            return _bind_path(Path(address.removeprefix("unix:").removeprefix("//")))
        host, _, port = address.rpartition(":")
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(where)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as error:
        raise UnavailableError(f"cannot listen on {address} ({error}); stop what uses it, or choose another address") from error


def bound_address(address: str, bound: socket.socket) -> str:
    """The address with the port that was chosen."""
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{bound.getsockname()[1]}"


def _bind_path(path: Path) -> socket.socket:
    """Takes over what a process that is gone has left."""
    with socket.socket(socket.AF_UNIX) as client:
        if client.connect_ex(str(path)) == 0:
            raise OSError("another process serves on it")
    with contextlib.suppress(FileNotFoundError):
        if path.is_socket():
            path.unlink()
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound


class Certificates:
    """The TLS of a process's connections: a certificate that is renewed is used from the next handshake on.

    Args:
        tls: files.
        on_failed_reload: is told of changed files that can't be used.

    Raises:
        InvalidArgumentError: the files can't be used now.
    """

    def __init__(self, tls: ServerTls, on_failed_reload: Callable[[], None]) -> None:
        self._tls = tls
        self._on_failed_reload = on_failed_reload
        self._watch = FileWatch(tls.files)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load()

    async def follow(self) -> None:
        """Looks at the files every second; never returns."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            if not self._watch.has_changed():
                continue
            try:
                self._load()
            except SpecwireError as error:
                self._on_failed_reload()
                logger.error("the changed TLS files are not used, the ones before stay: %s", error)
            else:
                logger.info("the TLS files have changed and are used from now on: %s", ", ".join(self._tls.files))

    def _load(self) -> None:
        read_pair(self._tls.cert, self._tls.key)
        if self._tls.client_ca:
            read_ca(self._tls.client_ca)
            self.context.load_verify_locations(cafile=self._tls.client_ca)
            self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.load_cert_chain(self._tls.cert, self._tls.key, password=lambda: "")
