"""The HTTP service over a coordinator, real or with scripted peers: all in the test's own loop, over real sockets."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig, HttpConfig
from specwire.http.app import make_app
from specwire.http.board import Board
from specwire.http.lifetime import Lifetime
from specwire.http.metrics import LAYOUT, STALLED_CLIENTS
from specwire.http.service import HttpService
from specwire.http.sockets import Certificates, bind, bound_address
from specwire.http.spans import open_spans
from specwire.http.upstream import Upstream
from specwire.http.web_server import Site, WebServer
from specwire.tls import server_tls
from tests.client.served import CHAT_TEMPLATE
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until

_LISTEN: dict[str, Any] = {"listen": ("127.0.0.1:0",)}


@dataclasses.dataclass(frozen=True, slots=True)
class Front:
    """A running HTTP service and OpenAI's client of it."""

    url: str
    service: HttpService
    upstream: Upstream
    openai: openai.AsyncOpenAI

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **headers: str) -> "Answer":
        """What a path answers to a body as it is: an object as JSON, or bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, content, **{"content-type": "application/json"} | headers)

    async def get(self, path: str, **headers: str) -> "Answer":
        return await self.call("GET", path, **headers)

    async def call(self, method: str, path: str, content: bytes = b"", **headers: str) -> "Answer":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request(method, path, content, **headers))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        status, *lines = head.decode().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Answer(int(status.split()[1]), fields, _unchunk(body) if fields.get("transfer-encoding") == "chunked" else body)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The objects of a stream, which ends with [DONE] and has no other one."""
        *data, done = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        assert done == "[DONE]", self.body
        return [json.loads(line) for line in data]


def request(method: str, path: str, content: bytes = b"", **headers: str) -> bytes:
    """A whole HTTP request, after which the connection closes."""
    fields = {"host": "test", "connection": "close", "content-length": str(len(content))} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@dataclasses.dataclass(frozen=True, slots=True)
class Served(Front):
    """With the coordinator and its peers."""

    engine: Engine
    verifier: ScriptedVerifier
    drafter: ScriptedDrafter
    network: LocalNetwork

    @property
    def is_idle(self) -> bool:
        """Nothing is active anywhere, and all KV blocks are free."""
        slots = self.verifier.session.slots if self.verifier.session else {}
        counts = self.verifier.num_blocks_used, self.drafter.num_open, self.service.lifetime.num_running
        return not self.engine._requests and not slots and counts == (0, 0, 0)

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        await until(lambda: self.is_idle, timeout_s)


@contextlib.asynccontextmanager
async def front(config: HttpConfig, api_key: str = "any", send_buffer: int = 0) -> AsyncIterator[Front]:
    """The HTTP service, as ready as a coordinator that serves makes it; send_buffer: bytes that the system keeps for a client, 0 = as it likes."""
    tls = server_tls(config)
    certificates = None if tls is None else Certificates(tls, lambda: None)
    bound = bind(config.listen[0], is_shared=False)
    if send_buffer:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"{'https' if tls else 'http'}://{bound_address(config.listen[0], bound)}"
    upstream, lifetime = Upstream(config), Lifetime()
    board = Board(LAYOUT)
    spans = open_spans(config, board)
    service = HttpService(config, upstream, lifetime, board, spans)
    service.serves = True
    site = Site(make_app(service, config), [bound], certificates.context if certificates else None)
    server = WebServer([site], config.keep_alive_s, config.client_stall_s, lambda: board.add(STALLED_CLIENTS))
    await server.start()
    following = asyncio.create_task(certificates.follow()) if certificates else None
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30.0)
    try:
        yield Front(url, service, upstream, client)
    finally:
        if following:
            following.cancel()
        await client.close()
        await lifetime.drain(0)
        await server.stop()
        await upstream.close()
        await asyncio.to_thread(spans.close)


@contextlib.asynccontextmanager
async def http_served(
    folder: Path,
    *,
    verifier: dict[str, Any] | None = None,
    coordinator: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    api_key: str = "any",
    send_buffer: int = 0,
) -> AsyncIterator[Served]:
    """A target that says letters and spaces, with a chat template that knows tools and enable_thinking.

    Args:
        folder: for sockets.
        verifier, coordinator, http: what is different, of the script and the configurations.
        api_key: of the client.
        send_buffer: as of `front`.
    """
    target = ScriptedVerifier(byte_verifier_script(**{"tokenizer": dataclasses.replace(make_spec(), chat_template=CHAT_TEMPLATE)} | (verifier or {})))
    drafter = ScriptedDrafter(byte_drafter_script(alphabet=target.script.alphabet))
    network = LocalNetwork()
    network.put("v:1", target)
    network.put("d:1", drafter)
    fields = {"listen": (f"unix:{folder}/coordinator.sock",), "verifiers": ("v:1",), "drafters": ("d:1",)} | (coordinator or {})
    config = CoordinatorConfig(**fields)
    engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
    async with _coordinator(engine, config) as address:
        own = HttpConfig(**_LISTEN | {"coordinator": address} | (http or {}))
        async with front(own, api_key, send_buffer) as running:
            yield Served(running.url, running.service, running.upstream, running.openai, engine, target, drafter, network)


@contextlib.asynccontextmanager
async def _coordinator(engine: Engine, config: CoordinatorConfig) -> AsyncIterator[str]:
    """Its address."""
    server = CoordinatorServer(engine, config)
    await server.start()
    await engine.start()
    following = asyncio.create_task(server.follow_readiness())
    try:
        while not engine.ready.is_ready:
            await engine.readiness_changed()
        yield server.bound_addresses[0]
    finally:
        following.cancel()
        await engine.stop(0)
        await server.stop(0)
        engine.check_integrity()


def _unchunk(body: bytes) -> bytes:
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return content
