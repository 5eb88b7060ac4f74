"""The HTTP service over a coordinator with scripted peers: all in the test's own loop, over real sockets."""

import contextlib
import dataclasses
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
from specwire.http.metrics import LAYOUT
from specwire.http.service import HttpService
from specwire.http.sockets import bind, bound_address
from specwire.http.upstream import Upstream
from specwire.http.web_server import Site, WebServer
from tests.client.served import CHAT_TEMPLATE
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What runs, and a client of it."""

    url: str
    engine: Engine
    verifier: ScriptedVerifier
    drafter: ScriptedDrafter
    service: HttpService
    openai: openai.AsyncOpenAI

    @property
    def is_idle(self) -> bool:
        """Nothing is active anywhere, and all KV blocks are free."""
        slots = self.verifier.session.slots if self.verifier.session else {}
        return (
            not self.engine._requests
            and not slots
            and self.verifier.num_blocks_used == 0
            and self.drafter.num_open == 0
            and self.service.lifetime.num_running == 0
        )

    async def until_idle(self) -> None:
        await until(lambda: self.is_idle)


@contextlib.asynccontextmanager
async def http_served(
    folder: Path,
    *,
    verifier: dict[str, Any] | None = None,
    coordinator: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    api_key: str = "any",
) -> AsyncIterator[Served]:
    """A target that says letters and spaces, with a chat template that knows tools and enable_thinking.

    Args:
        folder: for sockets.
        verifier, coordinator, http: what is different, of the script and the configurations.
        api_key: of the client.
    """
    target = ScriptedVerifier(byte_verifier_script(**{"tokenizer": dataclasses.replace(make_spec(), chat_template=CHAT_TEMPLATE)} | (verifier or {})))
    drafter = ScriptedDrafter(byte_drafter_script())
    network = LocalNetwork()
    network.put("v:1", target)
    network.put("d:1", drafter)
    address = f"unix:{folder}/coordinator.sock"
    config = CoordinatorConfig(listen=(address,), verifiers=("v:1",), drafters=("d:1",), **(coordinator or {}))
    engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
    async with _coordinator(engine, config):
        http_config = HttpConfig(**{"listen": ("127.0.0.1:0",), "coordinator": address} | (http or {}))
        bound = bind(http_config.listen[0], is_shared=False)
        url = f"http://{bound_address(http_config.listen[0], bound)}"
        upstream, lifetime, board = Upstream(http_config), Lifetime(), Board(LAYOUT)
        service = HttpService(http_config, upstream, lifetime, board)
        service.serves = True
        server = WebServer([Site(make_app(service, http_config), [bound])], http_config.keep_alive_s)
        await server.start()
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30.0)
        try:
            yield Served(url, engine, target, drafter, service, client)
        finally:
            await client.close()
            await lifetime.drain(0)
            await server.stop()
            await upstream.close()


@contextlib.asynccontextmanager
async def _coordinator(engine: Engine, config: CoordinatorConfig) -> AsyncIterator[None]:
    server = CoordinatorServer(engine, config)
    await server.start()
    await engine.start()
    try:
        while not engine.ready.is_ready:
            await engine.readiness_changed()
        yield
    finally:
        await engine.stop(0)
        await server.stop(0)
        engine.check_integrity()
