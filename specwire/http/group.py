"""Several processes on the same ports: started together, restarted one by one, stopped together."""

import asyncio
import contextlib
import dataclasses
import logging
import sys
from pathlib import Path

from specwire.config import HttpConfig, flags
from specwire.http.board import Board
from specwire.http.health import HealthService
from specwire.http.metrics import LAYOUT
from specwire.http.sockets import bind, bound_address
from specwire.http.upstream import Upstream
from specwire.launch import ServiceSpec, Supervisor
from specwire.rpc import wait_for_stop_signal
from specwire.socket_folder import socket_folder

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0
"""What processes get on top of their grace, before they are killed."""


async def serve_group(config: HttpConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        UnavailableError: an address can't be bound.
    """
    stop_signal = asyncio.create_task(wait_for_stop_signal())
    wanted = (*config.listen, *filter(None, [config.metrics_listen]))
    for address in wanted:
        bind(address, is_shared=False).close()  # says if somebody else, who shares it too, serves there
    # They hold the ports, also those that were chosen, but take no connections: only sockets that listen do.
    holders = [bind(address, is_shared=True) for address in wanted]
    chosen = [bound_address(address, bound) for address, bound in zip(wanted, holders, strict=True)]
    addresses = tuple(chosen[: len(config.listen)])
    upstream, health = Upstream(config), HealthService(config.health_listen)
    with socket_folder("specwire-http-") as folder:
        path = Path(folder, "counts")
        Board.make(LAYOUT, path, config.processes)
        own = dataclasses.replace(config, listen=addresses, metrics_listen="".join(chosen[len(addresses) :]))
        specs = [_spec(index, path, dataclasses.replace(own, health_listen=f"unix:{folder}/{index}")) for index in range(config.processes)]
        supervisor = Supervisor([specs], _pass_on, grace_s=config.grace_s + _LAST_WORDS_S)
        tasks: list[asyncio.Task[None]] = []
        try:
            for service in supervisor.groups[0]:
                await service.start()
            await health.start()  # behind them: gRPC says a line for each process that is started while it has threads
            tasks = [asyncio.create_task(supervisor.watch()), asyncio.create_task(_follow(supervisor, upstream, health, addresses))]
            await asyncio.wait([stop_signal, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            logger.info("stopping")
        finally:
            for task in (stop_signal, *tasks):
                task.cancel()
            await asyncio.gather(stop_signal, *tasks, return_exceptions=True)
            await asyncio.gather(health.stop(), supervisor.stop())
            await upstream.close()
            for holder in holders:
                holder.close()


async def _follow(supervisor: Supervisor, upstream: Upstream, health: HealthService, addresses: tuple[str, ...]) -> None:
    """Keeps health as the coordinator's is, once a process takes requests; never returns."""
    waiting = [asyncio.create_task(service.wait_serving()) for service in supervisor.groups[0]]
    try:
        await asyncio.gather(*waiting)
    finally:
        for task in waiting:
            task.cancel()
    is_announced = False
    async for serves in upstream.own.watch_serving():
        await health.set_serving(serves)
        if serves and not is_announced:
            is_announced = True
            logger.info("ready: http %s, %d processes", " ".join(addresses), len(waiting))


def _spec(index: int, path: Path, config: HttpConfig) -> ServiceSpec:
    arguments = (str(index), str(path), "--config=", *flags(config))
    return ServiceSpec(f"http-{index}", "specwire.http.worker", arguments, config.health_listen)


def _pass_on(name: str, line: str) -> None:
    """Their lines say who wrote them."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
