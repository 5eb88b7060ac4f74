"""A coordinator's front over a scripted engine, on a Unix socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig
from tests.coordinator.scripted_engine import ScriptedEngine


@contextlib.asynccontextmanager
async def serving(engine: ScriptedEngine, socket_dir: Path, *, max_message_mb: int = 64, max_queue: int = 1024) -> AsyncIterator[CoordinatorServer]:
    config = CoordinatorConfig(listen=(f"unix:{socket_dir}/coordinator.sock",), max_message_mb=max_message_mb, max_queue=max_queue)
    server = CoordinatorServer(engine, config)  # type: ignore[arg-type]
    await server.start()
    following = asyncio.create_task(server.follow_readiness())
    try:
        yield server
    finally:
        following.cancel()
        await server.stop(0)
        engine.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Lets the loop run until something is so that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is inside the code under test
            await asyncio.sleep(0.001)
