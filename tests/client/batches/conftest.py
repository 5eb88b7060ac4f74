"""A client of an engine that never ends by itself."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specwire import AsyncClient
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving


@pytest.fixture
async def engine() -> ScriptedEngine:
    """Counts up in bytes, and never ends by itself."""
    engine = ScriptedEngine(make_spec())
    engine.eos_token_ids, engine.vocab_size = (), 1000
    engine.retry_after_ms = 5
    return engine


@pytest.fixture
async def client(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[AsyncClient]:
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0], max_message_mb=1) as client:
        yield client
