"""A coordinator's front over a scripted engine, on a Unix socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
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
