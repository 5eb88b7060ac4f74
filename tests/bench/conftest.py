"""A coordinator over a scripted verifier and drafter, on a thread of its own, for commands that run their own event loop."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig
from specwire.speculative_config import SpeculativeConfig
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until

K = 3
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@dataclass
class Served:
    """Everything that runs in the thread."""

    address: str
    verifier: ScriptedVerifier
    drafter: ScriptedDrafter
    engine: Engine

    def expected(self, token_ids: list[int], num_tokens: int, seed: int) -> list[int]:
        """What the target alone gives."""
        return self.verifier.target.generate(token_ids, num_tokens, seed)


@pytest.fixture
def served(socket_dir: Path) -> Iterator[Served]:
    network = LocalNetwork()
    spec = replace(make_spec(), chat_template=CHAT_TEMPLATE)
    verifier = ScriptedVerifier(byte_verifier_script(tokenizer=spec, max_num_seqs=64, max_num_batched_tokens=512, num_blocks=8192))
    drafter = ScriptedDrafter(byte_drafter_script(acceptance=0.7))
    network.put("v:1", verifier)
    network.put("d:1", drafter)
    config = CoordinatorConfig(
        listen=(f"unix:{socket_dir}/coordinator",),
        verifiers=("v:1",),
        drafters=("d:1",),
        min_draft_wait_ms=10_000.0,
        max_queue=256,
        speculative_config=SpeculativeConfig(num_speculative_tokens=K),
    )
    started: list[Served] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
        server = CoordinatorServer(engine, config)
        await server.start()
        await engine.start()
        following = asyncio.create_task(server.follow_readiness())
        await until(lambda: bool(engine.lanes) and all(lane.is_ready and lane.links and lane.links[0].is_connected for lane in engine.lanes))
        started.append(Served(server.bound_addresses[0], verifier, drafter, engine))
        ready.set()
        await stop.wait()
        following.cancel()
        await asyncio.gather(engine.stop(0), server.stop(1))

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()
    loop.close()
