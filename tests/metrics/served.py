"""A coordinator over scripted services on a socket, on a thread of its own for clients that block."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig
from tests.scripted.cluster import Cluster
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script


@dataclasses.dataclass
class ServedCluster:
    """A cluster that clients reach."""

    cluster: Cluster
    address: str


@contextlib.asynccontextmanager
async def serve_cluster(socket_dir: Path, *, k: int = 3, max_queue: int = 1024, **config: Any) -> AsyncIterator[ServedCluster]:
    """One verifier, one drafter that is always right, everything connected. config: further fields of the server's."""
    address = f"unix:{socket_dir}/coordinator.sock"
    server_config = CoordinatorConfig(listen=(address,), max_queue=max_queue, **config)
    scripts = [byte_verifier_script()], [byte_drafter_script(acceptance=1.0)]
    async with Cluster(*scripts, k=k, max_queue=max_queue, min_draft_wait_ms=10_000) as cluster:
        server = CoordinatorServer(cluster.engine, server_config)
        await server.start()
        following = asyncio.create_task(server.follow_readiness())
        try:
            await cluster.all_there()
            yield ServedCluster(cluster, address)
        finally:
            following.cancel()
            await server.stop(0)


@contextlib.contextmanager
def serve_in_thread(socket_dir: Path) -> Iterator[str]:
    """The address of a served cluster."""
    addresses: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        async with serve_cluster(socket_dir) as served:
            addresses.append(served.address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert ready.wait(60), "the coordinator did not start"
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive(), "the coordinator did not stop"
        loop.close()
