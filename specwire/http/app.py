"""The API's paths, and what each of them answers."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from specwire.config import HttpConfig
from specwire.errors import InternalError, SpecwireError
from specwire.http.failures import Refusal, let_go, refusal_of
from specwire.http.fields import Fields
from specwire.http.gate import Gate
from specwire.http.lifetime import ClientGoneError
from specwire.http.metrics import DISCONNECTS
from specwire.http.playground import Playground
from specwire.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specwire.http.service import HttpService
from specwire.metrics.endpoint import CONTENT_TYPE
from specwire.version import build_version

logger = logging.getLogger(__name__)

_PREFLIGHT_S = 600
Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: HttpService, config: HttpConfig) -> ASGIApp:
    """The ASGI application: the service's answers under OpenAI's paths and some of vLLM's.

    Args:
        config: limits, and which web pages may call.
    """
    app = _make_fastapi("/openapi.json")
    add = _Adder(app, service)
    add("POST", "/v1/completions", service.completions, CompletionRequest)
    add("POST", "/v1/chat/completions", service.chat_completions, ChatRequest)
    add("GET", "/v1/models", service.models)
    add("GET", "/v1/models/{model:path}", service.model)
    add("POST", "/tokenize", service.tokenize, TokenizeRequest)
    add("POST", "/detokenize", service.detokenize, DetokenizeRequest)
    add("GET", "/health", _ready(service))
    add("GET", "/health/ready", _ready(service))
    add("GET", "/health/live", _live)
    add("GET", "/version", _version)
    add("GET", "/metrics", _metrics(service))
    add("GET", "/specwire/status", service.status)
    if config.playground:
        Playground().add_to(app)
    app.add_exception_handler(HTTPException, _no_such_path)
    gate = Gate(app, service.board, service.lifetime, config.max_body_mb << 20)
    if not config.cors_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=config.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", "retry-after-ms", "x-request-id"),
        max_age=_PREFLIGHT_S,
    )


def make_metrics_app(service: HttpService) -> ASGIApp:
    """The metrics alone."""
    app = _make_fastapi(None)
    _Adder(app, service)("GET", "/metrics", _metrics(service))
    return app


def _make_fastapi(schema_path: str | None) -> FastAPI:
    # The pages that show the schema would be loaded from elsewhere; spans and numbers are our own.
    silent: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    return FastAPI(title="Specwire", version=build_version(), docs_url=None, redoc_url=None, openapi_url=schema_path, telemetry=silent)


class _Adder:
    """Adds paths to an application, whose errors all look alike."""

    def __init__(self, app: FastAPI, service: HttpService) -> None:
        self._app = app
        self._service = service

    def __call__(self, method: str, path: str, handler: Handler, body: type[Fields] | None = None) -> None:
        extra: dict[str, Any] | None = None
        if body is not None:
            # Bodies are read by `read_fields`, which names what is wrong in OpenAI's way: FastAPI can't know of them by itself.
            extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
        guarded = self._guard(handler)
        self._app.add_api_route(path, guarded, methods=[method], openapi_extra=extra, response_model=None)
        if method == "GET":
            # Uvicorn leaves the body of the answer out. A route of its own: the schema lists what GET gives.
            self._app.add_api_route(path, guarded, methods=["HEAD"], include_in_schema=False, response_model=None)

    def _guard(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                try:
                    return self._answer(request, error)
                finally:
                    let_go(error)

        guarded.__name__ = getattr(handler, "__name__", "handler")
        guarded.__doc__ = handler.__doc__
        return guarded

    def _answer(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGoneError | ClientDisconnect):
            self._service.board.add(DISCONNECTS, ("waiting",))
            return Response(status_code=499)
        if isinstance(error, Refusal):
            return error.response()
        if isinstance(error, SpecwireError):
            return refusal_of(error, {}).response()
        logger.error("unexpected error in %s", request.url.path, exc_info=error)
        return refusal_of(InternalError(f"{type(error).__name__} in {request.url.path}; the service's log has the details"), {}).response()


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"{error!r} is handled as what it is not"
    known = "docs/http.md lists the paths and their methods"
    refusal = Refusal(f"{request.method} {request.url.path[:200]!r}: {error.detail}; {known}", status=error.status_code, code="unknown_url")
    response = refusal.response()
    response.headers.update(error.headers or {})
    return response


def _ready(service: HttpService) -> Handler:
    async def ready(request: Request) -> Response:
        """Whether requests are taken now."""
        reason = service.why_not_ready
        return JSONResponse({"status": "not ready", "reason": reason} if reason else {"status": "ready"}, 503 if reason else 200)

    return ready


async def _live(request: Request) -> Response:
    """Whether the process answers at all."""
    return JSONResponse({"status": "live"})


async def _version(request: Request) -> Response:
    """Of the HTTP process."""
    return JSONResponse({"version": build_version()})


def _metrics(service: HttpService) -> Handler:
    async def metrics(request: Request) -> Response:
        """For Prometheus: the sums over all processes of this address."""
        return Response(await service.render_metrics(), headers={"content-type": CONTENT_TYPE})

    return metrics
