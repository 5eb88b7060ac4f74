"""HTTP/1.1 as a load generator needs it: connections that are kept and used again, and answers that are read as they come, at little cost."""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specwire.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    pass

_READ_BYTES = 1 << 16


class HttpClient:
    """Sends requests to one server; belongs to one event loop.

    Args:
        base_url: `http://host:port` or `https://host:port`, and what all paths begin with, if anything; a `/v1` at its end is the API's own.
        api_key: sent as a bearer token; empty = none.
        tls_ca: PEM file of the authorities to trust with https; empty = the public ones.
        tls_cert, tls_key: own certificate chain and key, for servers that ask for one.

    Raises:
        InvalidArgumentError: no such URL or file.
    """

    def __init__(self, base_url: str, *, api_key: str = "", tls_ca: str = "", tls_cert: str = "", tls_key: str = "") -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgumentError(f"--base-url is {base_url!r}, but must be http:// or https:// with a host, such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = urlsplit(self.base_url).path
        self._tls = _tls(tls_ca, tls_cert, tls_key) if parts.scheme == "https" else None
        self._headers = {"host": parts.netloc.rpartition("@")[2], "accept": "*/*"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._idle: deque[_Connection] = deque()

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator["HttpAnswer"]:
        """Sends a request and gives its answer once its headers are there. Leaving before the answer's end closes the connection.

        Raises:
            UnavailableError: the server can't be reached, or went away.
        """
        headers = self._headers | ({"content-type": "application/json", "content-length": str(len(body))} if body else {})
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        message = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        connection = await self._send(message)
        try:
            yield HttpAnswer(connection)
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def close(self) -> None:
        """Closes all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _send(self, message: bytes) -> "_Connection":
        # A server may close a connection that idles: only then is a request sent twice.
        if self._idle:
            connection = self._idle.pop()
            try:
                await connection.send(message)
                return connection
            except _ClosedError:
                connection.close()
            except BaseException:
                connection.close()
                raise
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise UnavailableError(f"the server at {self.base_url} can't be reached ({error}); is it running there?") from error
        connection = _Connection(reader, writer, self.base_url)
        try:
            await connection.send(message)
        except _ClosedError as error:
            connection.close()
            raise UnavailableError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection


class HttpAnswer:
    """An answer whose headers are there. status: its number; headers: with names in lower case."""

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises UnavailableError if the server goes away in the middle."""
        while (data := await self._connection.read_body()) is not None:
            yield data

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([data async for data in self.chunks()])


class _ClosedError(UnavailableError):
    """The connection was closed before a byte of an answer came."""


class _Connection:
    """One connection, and the parser of the answer that it is about."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str) -> None:
        self._reader = reader
        self._writer = writer
        self._url = url
        self._start()

    def _start(self) -> None:
        from httptools import HttpResponseParser

        self._parser: HttpResponseParser = HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self._has_bytes = self._has_headers = self._is_complete = self._stays_open = False
        self._body: list[bytes] = []

    @property
    def is_reusable(self) -> bool:
        return self._is_complete and self._stays_open and not self._writer.is_closing()

    async def send(self, message: bytes) -> None:
        """Returns once the headers of the answer are there. Raises UnavailableError."""
        self._start()
        try:
            self._writer.write(message)
            await self._writer.drain()
        except OSError as error:
            raise _ClosedError(f"the connection to {self._url} was lost ({error})") from error
        while not self._has_headers:
            await self._feed()
        self.status = self._parser.get_status_code()

    async def read_body(self) -> bytes | None:
        """What has come of the body, at least a byte; None at its end."""
        while not self._body and not self._is_complete:
            await self._feed()
        data = b"".join(self._body)
        self._body.clear()
        return data or None

    def close(self) -> None:
        self._writer.close()

    async def _feed(self) -> None:
        from httptools import HttpParserError

        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError as error:
            kind = UnavailableError if self._has_bytes else _ClosedError
            raise kind(f"the connection to {self._url} was lost ({error})") from error
        if not data:
            if self._has_headers and not {"content-length", "transfer-encoding"} & set(self.headers):
                self._is_complete = True  # the end of the connection is that of such a body
                return
            kind = UnavailableError if self._has_bytes else _ClosedError
            raise kind(f"the server at {self._url} closed the connection before its answer ended")
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            raise UnavailableError(f"what the server at {self._url} answers is no HTTP ({error})") from error

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._is_complete, self._stays_open = True, self._parser.should_keep_alive()


def _tls(ca: str, cert: str, key: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise InvalidArgumentError(f"--tls-ca {ca}, --tls-cert {cert} and --tls-key {key} can't be used ({error}); give PEM files") from error
    return context
