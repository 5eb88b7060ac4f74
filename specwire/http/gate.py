"""What every request passes: counting, the limit of its body, and the end of service while the process stops."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specwire.errors import UnavailableError
from specwire.http.board import Board
from specwire.http.failures import DEFAULT_RETRY_S, Refusal
from specwire.http.lifetime import Lifetime
from specwire.http.memory import BodyMemory
from specwire.http.metrics import CODES, REQUESTS, RUNNING

_ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat_completions",
    "/v1/models": "models",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_ALWAYS = ("/health/live", "/health/ready", "/metrics", "/version")
"""Answered also while the process stops, and not counted as running."""
_NUM_READ_AWAY = 4
"""Bodies of full size that are read of one that is too large."""


class Gate:
    """An ASGI application around another one.

    Args:
        app: answers.
        board: counts.
        lifetime: of the process's requests.
        max_body_bytes: largest body of a request.
    """

    def __init__(self, app: ASGIApp, board: Board, lifetime: Lifetime, max_body_bytes: int) -> None:
        self._app = app
        self._board = board
        self._lifetime = lifetime
        self._max_body_bytes = max_body_bytes
        self._memory = BodyMemory(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        status = 499

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._board.add(RUNNING)
        try:
            with self._lifetime:
                await self._admit(scope, receive, noting_send)
        finally:
            self._board.add(RUNNING, amount=-1)
            # Every status that is answered is in the list; a new one must not take the process down.
            code = str(status) if str(status) in CODES else "500" if status >= 500 else "400" if status >= 400 else "200"
            self._board.add(REQUESTS, (_ENDPOINTS.get(scope["path"], "other"), code))

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifetime.is_draining:
            text = "the HTTP service is about to stop; send the request again, to another one"
            refusal = Refusal(text, status=503, kind="service_unavailable_error", retry_after_ms=1000 * DEFAULT_RETRY_S)
            response = refusal.response()
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            response = self._too_large(int(length)).response()
            response.headers["connection"] = "close"
            if headers.get(b"expect", b"").lower() != b"100-continue":  # such a client asks before it sends
                await self._read_away(receive)
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message: Any = await receive()
            if message["type"] == "http.request":
                earlier, num_bytes = num_bytes, num_bytes + len(message.get("body", b""))
                try:
                    if num_bytes > self._max_body_bytes:
                        raise self._too_large(num_bytes)
                    self._memory.grow(earlier, num_bytes)
                except Refusal:
                    num_bytes = earlier
                    if message.get("more_body"):
                        await self._read_away(receive)
                    raise
            return message

        try:
            await self._app(scope, counting_receive, send)
        finally:
            self._memory.release(num_bytes)

    async def _read_away(self, receive: Receive) -> None:
        """The rest of a body, within reason: a client that still sends when the connection closes may never see the answer."""
        num_bytes = 0
        while num_bytes < _NUM_READ_AWAY * self._max_body_bytes:
            try:
                message: Any = await self._lifetime.read(receive())
            except UnavailableError:
                return
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return

    def _too_large(self, num_bytes: int) -> Refusal:
        text = f"the body has {num_bytes} bytes or more, but may have {self._max_body_bytes}; send less, or raise max_body_mb"
        return Refusal(text, status=413, code="request_too_large")
