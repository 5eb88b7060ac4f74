"""Tiny random models behind real services in the test's own process: fast, and open to a look inside."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_svc.server import DrafterServer
from specwire.client.aio import AsyncClient
from specwire.config import DrafterConfig, VerifierConfig
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.helpers import serve_drafter
from verifier_svc.verifier import Verifier

from .stack import Stack, coordinate, serve_verifier


@dataclass(frozen=True, slots=True)
class TinyStack:
    """One verifier, at most one drafter and a coordinator."""

    verifier: Verifier
    drafter: DrafterServer | None
    coordinator: Stack

    @property
    def client(self) -> AsyncClient:
        return self.coordinator.client


def verifier_config(folder: Path, *, num_speculative_tokens: int = 8, speculation: dict[str, Any] | None = None, **fields: Any) -> VerifierConfig:
    """A verifier of a tiny model: float32, one thread, few blocks."""
    spec = SpeculativeConfig.from_dict({"num_speculative_tokens": num_speculative_tokens} | (speculation or {}))
    return VerifierConfig(model=str(folder), dtype="float32", num_threads=1, speculative_config=spec, **{"num_kv_blocks": 128} | fields)


def drafter_config(folder: Path, *, num_speculative_tokens: int = 8, speculation: dict[str, Any] | None = None, **fields: Any) -> DrafterConfig:
    """A drafter with a tiny model."""
    spec = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": num_speculative_tokens}
    return DrafterConfig(
        dtype="float32", num_threads=1, kv_cache_memory=4 << 20, speculative_config=SpeculativeConfig.from_dict(spec | (speculation or {})), **fields
    )


@asynccontextmanager
async def tiny_stack(
    socket_dir: Path, verifier: VerifierConfig, drafter: DrafterConfig | None = None, *, speculation: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[TinyStack]:
    """All three services, ready. Other arguments are the coordinator's (see `coordinate`)."""
    async with AsyncExitStack() as resources:
        loaded, verifier_address = await resources.enter_async_context(serve_verifier(socket_dir, verifier))
        server, drafters = None, []
        if drafter is not None:
            server = await resources.enter_async_context(serve_drafter(socket_dir, drafter))
            drafters = [server.addresses[0]]
        stack = await resources.enter_async_context(coordinate(socket_dir, [verifier_address], drafters, speculation=speculation, **fields))
        yield TinyStack(loaded.verifier, server, stack)
