"""`python -m coordinator --flag value`: one coordinator process."""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable

from specwire.arguments import parse_flags
from specwire.config import CoordinatorConfig
from specwire.metrics import MetricsServer
from specwire.process import calm_garbage_collector, collect_circles, run_service
from specwire.rpc import wait_for_stop_signal

from .engine import Engine
from .exposition import METRICS, collect
from .rpc import Connectors
from .server import CoordinatorServer

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""What the server gets on top, to deliver how the last requests ended."""


async def serve(config: CoordinatorConfig, on_start: Callable[[Engine], Awaitable[None]] | None = None) -> None:
    """Serves until SIGTERM or SIGINT; NOT_SERVING while no verifier is there.

    Args:
        on_start: what else is to be started once the engine is.
    """
    stop_signal = asyncio.create_task(wait_for_stop_signal())
    connectors = Connectors(config)
    engine = Engine(config, connectors.verifier, connectors.drafter)
    engine.metrics.watch_peers(connectors)
    server = CoordinatorServer(engine, config)
    metrics = MetricsServer(config.metrics_listen, METRICS, lambda: collect(engine))
    metrics.start()
    await server.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        await engine.start()
        if on_start is not None:
            await on_start(engine)
        calm_garbage_collector()
        tasks = [asyncio.create_task(work) for work in (server.follow_readiness(), _announce(engine, server), collect_circles())]
        await stop_signal
        logger.info("stopping")
    finally:
        stop_signal.cancel()
        await asyncio.gather(engine.stop(config.grace_s), server.stop(config.grace_s + _LAST_WORDS_S))
        for task in tasks:
            task.cancel()
        await metrics.stop()


async def _announce(engine: Engine, server: CoordinatorServer) -> None:
    """Logs the line that says that requests are taken, once."""
    while not engine.ready.is_ready:
        await engine.readiness_changed()
    logger.info("ready: coordinator %s", " ".join(server.bound_addresses))


def main() -> None:
    """Entry point."""
    config = parse_flags(CoordinatorConfig, "python -m coordinator", sys.argv[1:])
    run_service("coordinator", lambda: serve(config))


if __name__ == "__main__":
    main()
