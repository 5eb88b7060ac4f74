"""A coordinator's front with a real engine behind it, over a scripted verifier in the same process, on a TCP port."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from coordinator.server import CoordinatorServer
from specwire.config import CoordinatorConfig
from tests.scripted.cluster import Cluster
from tests.scripted.verifier import VerifierScript
from tests.security.certificates import HOST


@contextlib.asynccontextmanager
async def serving(script: VerifierScript | None = None, **config: Any) -> AsyncIterator[tuple[CoordinatorServer, Cluster]]:
    """A ready coordinator and what is behind it; `config` are fields of CoordinatorConfig."""
    async with Cluster([script or VerifierScript()]) as cluster:
        await cluster.ready()
        server = CoordinatorServer(cluster.engine, CoordinatorConfig(**({"listen": (f"{HOST}:0",)} | config)))
        await server.start()
        following = asyncio.create_task(server.follow_readiness())
        try:
            yield server, cluster
        finally:
            following.cancel()
            await server.stop(0)
