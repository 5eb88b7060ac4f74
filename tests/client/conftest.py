"""A client of a served scripted engine, with a tokenizer and without one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specwire import AsyncClient
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving


@pytest.fixture
async def engine() -> ScriptedEngine:
    """Counts up in bytes: a prompt that ends in @ is followed by ABCDEFGH..."""
    return ScriptedEngine(make_spec())


@pytest.fixture
async def client(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[AsyncClient]:
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0]) as client:
        yield client


@pytest.fixture
async def ids_engine() -> ScriptedEngine:
    """Has no tokenizer."""
    return ScriptedEngine()


@pytest.fixture
async def ids_client(ids_engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[AsyncClient]:
    async with serving(ids_engine, socket_dir) as server, AsyncClient(server.bound_addresses[0], max_message_mb=1) as client:
        yield client
