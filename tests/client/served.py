"""A coordinator over a scripted verifier and drafter, on a thread of its own, for programs that block."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from coordinator.engine import Engine, RequestHandle
from coordinator.server import CoordinatorServer
from coordinator.sink import Sink
from specwire.config import CoordinatorConfig
from specwire.messages import GenerateRequest
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking %}<think>{% endif %}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Where it serves, what it serves with, and what it was asked."""

    address: str
    verifier: ScriptedVerifier
    requests: list[GenerateRequest]


@contextlib.contextmanager
def served(socket_dir: Path) -> Iterator[Served]:
    """The target says letters and spaces, up to 4096 tokens; its tokenizer has a chat template with tools and enable_thinking."""
    verifier = ScriptedVerifier(byte_verifier_script(tokenizer=dataclasses.replace(make_spec(), chat_template=CHAT_TEMPLATE), max_model_len=4096))
    drafter = ScriptedDrafter(byte_drafter_script(max_model_len=4096))
    config = CoordinatorConfig(listen=(f"unix:{socket_dir}/coordinator.sock",), verifiers=("v:1",), drafters=("d:1",))
    requests: list[GenerateRequest] = []
    loop, stop, is_ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        network = LocalNetwork()
        network.put("v:1", verifier)
        network.put("d:1", drafter)
        engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
        submit = engine.submit

        def noting_submit(message: GenerateRequest, sink: Sink) -> RequestHandle:
            requests.append(message)
            return submit(message, sink)

        server = CoordinatorServer(engine, config)
        engine.submit = noting_submit  # type: ignore[method-assign]
        await server.start()
        await engine.start()
        while not engine.ready.is_ready:
            await engine.readiness_changed()
        is_ready.set()
        await stop.wait()
        await asyncio.gather(engine.stop(0), server.stop(1))
        engine.check_integrity()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(60), "the coordinator did not become ready"
    try:
        yield Served(config.listen[0], verifier, requests)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
