"""What `specwire bench serve` calls, from its options."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specwire.cli.connection import PUBLIC_CA, ConnectionOptions, make_async_client
from specwire.errors import InvalidArgumentError

if TYPE_CHECKING:
    from specwire.bench.targets import Target

DEFAULT_URL = "http://127.0.0.1:8000"
BACKENDS = ("grpc", "openai")


def target_maker(
    connection: ConnectionOptions, *, backend: str, base_url: str, model: str, extra_body: str, is_chat: bool
) -> tuple[str, Callable[[], "Target"]]:
    """Where calls go, and what makes the target once there is an event loop.

    Raises:
        InvalidArgumentError: a backend that does not exist, options that go with another one, or a value that can't be used.
    """
    if backend not in BACKENDS:
        raise InvalidArgumentError(f"--backend is {backend!r}, but must be one of {', '.join(BACKENDS)}")
    if backend == "grpc":
        for flag, value in (("--base-url", base_url), ("--model", model), ("--extra-body", extra_body)):
            if value:
                raise InvalidArgumentError(f"{flag} goes with HTTP, but the backend is grpc; add --backend openai, or leave {flag} out")
        return connection.address, lambda: _grpc(connection)
    from specwire.bench.http_client import HttpClient
    from specwire.bench.http_target import HttpTarget

    ca = "" if connection.tls_ca == PUBLIC_CA else connection.tls_ca
    client = HttpClient(base_url or DEFAULT_URL, api_key=connection.api_key, tls_ca=ca, tls_cert=connection.tls_cert, tls_key=connection.tls_key)
    body = _object(extra_body)
    return client.base_url, lambda: HttpTarget(client, model=model, extra_body=body, is_chat=is_chat)


def _grpc(connection: ConnectionOptions) -> "Target":
    from specwire.bench.targets import GrpcTarget

    return GrpcTarget(make_async_client(connection), connection.address)


def _object(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"--extra-body is {text!r}, but must be JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f'--extra-body is {text!r}, but must be a JSON object, such as {{"top_k": 20}}')
    return value
