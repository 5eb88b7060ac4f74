"""A scripted engine, and a server in front of it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from specwire.rpc import open_channel
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()


@pytest.fixture
async def paused(engine: ScriptedEngine) -> ScriptedEngine:
    engine.is_paused = True
    return engine


@pytest.fixture
async def channel(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(engine, socket_dir, max_message_mb=1, max_queue=8) as server:
        channel = open_channel(server.bound_addresses[0])
        yield channel
        await channel.close()


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> CoordinatorServiceStub:
    return CoordinatorServiceStub(channel)


@pytest.fixture
def no_faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A lane survives a fault in its step, books that do not agree included, and logs it."""
    yield
    assert "a fault in" not in caplog.text
