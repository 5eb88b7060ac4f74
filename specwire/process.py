"""The frame of a service process: logging, event loop, and start-up errors as one line and an exit status."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from specwire.errors import SpecwireError
from specwire.log import set_up_logging
from specwire.standard_files import open_standard_files

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
CIRCLES_S = 5.0
_FILES_EVERYWHERE = 10_240
"""OPEN_MAX of macOS, which refuses more, whatever getrlimit says."""

# Threads of a model that wait for each other give up the core soon: later than what a layer computes on one thread takes, or each product
# waits for the others to wake (1000 takes twice the time of 4000), but long before the milliseconds of the default, with which a step on two
# threads takes ten times as long as on one where other processes want the cores too.
MODEL_ENVIRONMENT = (("GOMP_SPINCOUNT", "4000"),)


def set_model_environment() -> None:
    """Sets what makes models run well, unless the user did. Before torch is imported: its libraries read it when they are loaded."""
    for name, value in MODEL_ENVIRONMENT:
        os.environ.setdefault(name, value)


def calm_garbage_collector() -> None:
    """To be called once everything is loaded. A step makes thousands of tuples that die with it: at the default threshold of 700 they can cost a
    third of its time in collections, and one that goes through all of torch's objects takes 0.1 s."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])


async def collect_circles(interval_s: float = CIRCLES_S) -> None:
    """Frees what only holds each other, again and again; never returns. Each call leaves some of it, since gRPC's record of a call and the call's
    context hold each other, and both hold all that the call had. By itself the collector hardly ever comes: what steps make and free keeps its
    count low. What was there when `calm_garbage_collector` was called isn't looked at, so that it takes a millisecond."""
    while True:
        await asyncio.sleep(interval_s)
        gc.collect()


def allow_all_files() -> None:
    """Takes as many open files as this user may have. Each connection is one, and shells and service managers begin with 1024: a coordinator with so
    many clients could not even connect its verifier anew."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What is unlimited may be more than the kernel takes.
    everywhere = _FILES_EVERYWHERE if most == resource.RLIM_INFINITY else min(most, _FILES_EVERYWHERE)
    for number in (most, max(soft, everywhere)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, most))
            return
    logger.warning("this process keeps its limit of %d open files, since the system takes no higher one; each connection is one (ulimit -n)", soft)


def run_service(service: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a service's main coroutine until it returns (then the process should end with status 0).

    A SpecwireError ends the process with status 1 and one line on stderr; anything else is a fault and shows its traceback.

    Args:
        service: its name in the log: verifier, drafter, coordinator.
        serve: starts the service, logs `ready: <service> <addresses>`, waits for a stop signal and stops it.
    """
    open_standard_files()
    set_up_logging(service)
    allow_all_files()
    try:
        uvloop.run(serve())
    except SpecwireError as error:
        logger.error("%s", " ".join(str(error).split()))
        raise SystemExit(1) from None
