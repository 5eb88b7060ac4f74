"""`python -m verifier_svc --flag value`: serves one target model."""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import asyncio
import logging
import os
import sys
import uuid
from typing import TYPE_CHECKING

from specwire.arguments import parse_flags
from specwire.config import VerifierConfig
from specwire.extras import check_engine
from specwire.metrics import MetricsServer
from specwire.phases import Phases
from specwire.process import calm_garbage_collector, run_service, set_model_environment
from specwire.rpc import wait_for_stop_signal
from specwire.tls import server_tls
from specwire.tracing import open_tracer

from .metrics import METRICS
from .server import VerifierServer

if TYPE_CHECKING:
    from .loading import LoadedVerifier

logger = logging.getLogger(__name__)

_LAST_ROUNDS_S = 2.0
"""What the rounds of a coordinator that did not leave get on top of the grace."""


async def serve(config: VerifierConfig) -> None:
    """Binds, loads, serves until SIGTERM or SIGINT."""
    instance_id = uuid.uuid4().hex
    tracer = open_tracer("verifier", instance_id, endpoint=config.trace_endpoint, file=config.trace_file)
    server = VerifierServer(
        config.listen,
        lambda: _load(config, instance_id),
        instance_id,
        config.max_outstanding_rounds,
        config.max_message_mb << 20,
        tracer,
        server_tls(config),
    )
    metrics = MetricsServer(config.metrics_listen, METRICS, server.metrics.collect)
    metrics.start()
    stop_signal = asyncio.create_task(wait_for_stop_signal())
    await server.start()
    serving = asyncio.create_task(_load_and_watch(server))
    try:
        await asyncio.wait((serving, stop_signal), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        logger.info("stopping")
        await server.drain(config.grace_s)
    finally:
        serving.cancel()
        stop_signal.cancel()
        await metrics.stop()
        if not await server.stop(_LAST_ROUNDS_S) and stop_signal.done():
            # The interpreter's own ending would wait for the thread: a large model loads for minutes.
            logger.info("leaving while the model is still busy")
            os._exit(0)


async def _load_and_watch(server: VerifierServer) -> None:
    """Never returns: raises what keeps the verifier from serving, at the start or later."""
    await server.load()
    calm_garbage_collector()
    logger.info("ready: verifier %s", " ".join(server.bound_addresses))
    await server.wait_broken()


def _load(config: VerifierConfig, instance_id: str) -> "LoadedVerifier":
    check_engine("torch", "safetensors")
    phases = Phases()
    with phases.phase("import"):
        from .loading import load_verifier  # brings torch, which takes seconds
    return load_verifier(config, instance_id, phases)


def main() -> None:
    config = parse_flags(VerifierConfig, "python -m verifier_svc", sys.argv[1:])
    set_model_environment()
    run_service("verifier", lambda: serve(config))


if __name__ == "__main__":
    main()
