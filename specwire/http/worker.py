"""`python -m specwire.http.worker COLUMN BOARD --flags`: one of several processes that serve on the same ports; `specwire.http` starts them."""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import asyncio
import logging
import socket
import sys
from pathlib import Path

from specwire.addresses import is_local
from specwire.arguments import parse_flags
from specwire.config import HttpConfig
from specwire.http.app import make_app, make_metrics_app
from specwire.http.board import Board
from specwire.http.health import HealthService
from specwire.http.lifetime import Lifetime
from specwire.http.metrics import FAILED_RELOADS, LAYOUT, READY, STALLED_CLIENTS
from specwire.http.service import HttpService
from specwire.http.sockets import Certificates, bind, bound_address
from specwire.http.spans import open_spans
from specwire.http.upstream import Upstream
from specwire.http.web_server import Site, WebServer
from specwire.process import run_service
from specwire.rpc import wait_for_stop_signal
from specwire.tls import server_tls

logger = logging.getLogger(__name__)


async def serve(config: HttpConfig, board: Board) -> None:
    """Serves until SIGTERM or SIGINT; then no request is taken, and those that run have their grace.

    Raises:
        UnavailableError: an address can't be bound.
        InvalidArgumentError: a file of TLS can't be used.
    """
    stop_signal = asyncio.create_task(wait_for_stop_signal())
    tls = server_tls(config)
    certificates = None if tls is None else Certificates(tls, lambda: board.add(FAILED_RELOADS))
    sockets = [bind(address, is_shared=config.processes > 1) for address in config.listen]
    addresses = [bound_address(address, bound) for address, bound in zip(config.listen, sockets, strict=True)]
    metrics_sockets = [bind(config.metrics_listen, is_shared=config.processes > 1)] if config.metrics_listen else []
    for bound in metrics_sockets:
        logger.info("metrics on http://%s/metrics", bound_address(config.metrics_listen, bound))
    _warn_if_exposed(addresses, has_tls=tls is not None)
    upstream, lifetime, health, spans = Upstream(config), Lifetime(), HealthService(config.health_listen), open_spans(config, board)
    service = HttpService(config, upstream, lifetime, board, spans)
    sites = _sites(service, config, sockets, metrics_sockets, certificates)
    server = WebServer(sites, config.keep_alive_s, config.client_stall_s, lambda: board.add(STALLED_CLIENTS))
    tasks: list[asyncio.Task[None]] = []
    try:
        await health.start()
        await server.start()
        tasks.append(asyncio.create_task(_follow(service, upstream, health, board, addresses)))
        if certificates:
            tasks.append(asyncio.create_task(certificates.follow()))
        await asyncio.wait([stop_signal, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        logger.info("stopping: %d running", lifetime.num_running)
    finally:
        stop_signal.cancel()
        for task in tasks:
            task.cancel()
        _set_ready(board, is_ready=False)
        await asyncio.gather(*tasks, health.stop(), lifetime.drain(config.grace_s), return_exceptions=True)
        await server.stop()
        await upstream.close()
        await asyncio.to_thread(spans.close)


def _sites(
    service: HttpService, config: HttpConfig, sockets: list[socket.socket], metrics_sockets: list[socket.socket], certificates: Certificates | None
) -> list[Site]:
    """Unix sockets never have TLS: they rely on file rights."""
    app = make_app(service, config)
    paths = [bound for bound in sockets if bound.family == socket.AF_UNIX]
    ports = [bound for bound in sockets if bound.family != socket.AF_UNIX]
    return [
        Site(app, ports, certificates.context if certificates else None),
        Site(app, paths),
        Site(make_metrics_app(service), metrics_sockets),
    ]


async def _follow(service: HttpService, upstream: Upstream, health: HealthService, board: Board, addresses: list[str]) -> None:
    """Keeps health as the coordinator's is; never returns."""
    is_announced = False
    async for serves in upstream.own.watch_serving():
        if serves != service.serves:
            logger.info("the coordinator %s", "serves" if serves else "does not serve")
        if serves and not is_announced:
            await upstream.prepare()
        service.serves = serves
        _set_ready(board, is_ready=serves)
        await health.set_serving(serves)
        if serves and not is_announced:
            is_announced = True
            logger.info("ready: http %s", " ".join(addresses))


def _set_ready(board: Board, *, is_ready: bool) -> None:
    board.add(READY, amount=is_ready - board.own(READY))


def _warn_if_exposed(addresses: list[str], *, has_tls: bool) -> None:
    exposed = " ".join(address for address in addresses if not is_local(address))
    if exposed and not has_tls:
        logger.warning("what is sent to %s, API keys too, travels in the clear: set tls_cert and tls_key, or put a proxy with TLS before it", exposed)


def main() -> None:
    """Entry point of one of several processes."""
    column, path, *arguments = sys.argv[1:]
    config = parse_flags(HttpConfig, "python -m specwire.http.worker", arguments)
    board = Board(LAYOUT, Path(path), int(column), config.processes)
    run_service(f"http-{column}", lambda: serve(config, board))


if __name__ == "__main__":
    main()
