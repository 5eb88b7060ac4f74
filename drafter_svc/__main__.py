"""`python -m drafter_svc --flag value`: one drafter process."""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import asyncio
import logging
import os
import sys
from collections.abc import Callable

from specwire.arguments import parse_flags
from specwire.config import DrafterConfig
from specwire.metrics import MetricsServer
from specwire.process import calm_garbage_collector, run_service, set_model_environment
from specwire.rpc import wait_for_stop_signal

from .method import Method, build_method
from .metrics import METRICS
from .server import DrafterServer

logger = logging.getLogger(__name__)


async def serve(config: DrafterConfig, build: Callable[[DrafterConfig], Method] = build_method) -> None:
    """Serves until SIGTERM or SIGINT; raises what keeps it from serving.

    Args:
        build: makes the drafting method.
    """
    for line in config.speculative_config.unread:
        logger.warning("%s", line)
    server = DrafterServer(config, build)
    metrics = MetricsServer(config.metrics_listen, METRICS, server.worker.metrics.collect)
    metrics.start()
    await server.start()
    stopped, serving = asyncio.create_task(wait_for_stop_signal()), asyncio.create_task(_load_and_watch(server))
    try:
        await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        await server.drain(config.grace_s)
    finally:
        serving.cancel()
        stopped.cancel()
        await metrics.stop()
        if not await server.stop():
            # A thread inside a library's native code can crash the interpreter's own ending.
            logger.info("leaving while the model is still busy")
            os._exit(0)


async def _load_and_watch(server: DrafterServer) -> None:
    """Never returns: raises what keeps the drafter from serving, at the start or later."""
    await server.wait_ready()
    calm_garbage_collector()
    logger.info("ready: drafter %s", " ".join(server.addresses))
    await server.wait_broken()


def main() -> None:
    """Entry point."""
    config = parse_flags(DrafterConfig, "python -m drafter_svc", sys.argv[1:])
    set_model_environment()
    run_service("drafter", lambda: serve(config))


if __name__ == "__main__":
    main()
