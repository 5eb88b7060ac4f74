"""What went wrong, as OpenAI's clients expect to be told: a status, and a JSON object that names the parameter."""

import json
import math
import re
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from specwire import errors

DEFAULT_RETRY_S = 1
"""Seconds after which a request is worth sending again, where the coordinator does not say."""
_STATUSES: tuple[tuple[type[errors.SpecwireError], int, str, str | None], ...] = (
    (errors.InvalidArgumentError, 400, "invalid_request_error", None),
    (errors.UnsupportedError, 400, "invalid_request_error", "unsupported"),
    (errors.FailedPreconditionError, 400, "invalid_request_error", None),
    (errors.UnauthenticatedError, 401, "authentication_error", "invalid_api_key"),
    (errors.ResourceExhaustedError, 400, "invalid_request_error", "request_too_large"),
    (errors.UnavailableError, 503, "service_unavailable_error", None),
    (errors.AbortedError, 503, "service_unavailable_error", None),
    (errors.CancelledError, 503, "service_unavailable_error", None),
    (errors.DeadlineExceededError, 504, "timeout_error", None),
)
# How the messages of other parts begin: with the name of what is wrong.
_FIRST_NAME = re.compile(r"(?:a token id in |the )?(\w+)")
_TOO_LONG = re.compile(r"the prompt has \d+ (?:tokens|characters)")


class Refusal(Exception):
    """A request that is answered with an error.

    Args:
        message: the value, the limit and the remedy.
        status: of HTTP.
        param: the parameter that is wrong.
        code: a word for programs.
        kind: OpenAI's `type`.
        retry_after_ms: when to send it again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_ms = retry_after_ms

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def event(self) -> bytes:
        """The same in the middle of a stream."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"

    def response(self) -> Response:
        """The answer to the request; clients read when to come back from its headers."""
        headers = {}
        if self.retry_after_ms is not None:
            headers = {"retry-after": str(math.ceil(self.retry_after_ms / 1000)), "retry-after-ms": str(self.retry_after_ms)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        # ASCII: what it quotes need not be valid Unicode.
        return Response(json.dumps(self.body), self.status, headers, "application/json")


def refusal_of(error: errors.SpecwireError, names: Mapping[str, str]) -> Refusal:
    """The answer that an error of the client or the coordinator becomes.

    Args:
        names: parameters that such a message may begin with, and what the request called them.
    """
    message = str(error)
    if isinstance(error, errors.ResourceExhaustedError) and error.retry_after_ms is not None:
        return Refusal(message, status=429, kind="rate_limit_error", code="overloaded", retry_after_ms=error.retry_after_ms)
    for kind, status, label, code in _STATUSES:
        if isinstance(error, kind):
            retry_after_ms = (error.retry_after_ms or 1000 * DEFAULT_RETRY_S) if status == 503 else None
            code = "context_length_exceeded" if status == 400 and _TOO_LONG.match(message) else code
            return Refusal(message, status=status, kind=label, code=code, param=_param(message, names), retry_after_ms=retry_after_ms)
    return Refusal(message, status=500, kind="internal_error")


def let_go(error: BaseException | None) -> None:
    """Frees what the calls had that failed: the request's body, too. With an error that a task holds, their frames are a circle, which would be
    kept until the collector goes through all objects, perhaps hours later."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _param(message: str, names: Mapping[str, str]) -> str | None:
    found = _FIRST_NAME.match(message)
    return names.get(found[1]) if found else None
