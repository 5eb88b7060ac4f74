"""A progress bar on standard error, where that is a terminal, and Ctrl-C as the wish to see what there is."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specwire.bench.record import INTERRUPTED, RequestRecord


@contextlib.contextmanager
def show_progress(label: str, total: int, *, says_start: bool = False) -> Iterator[Callable[[RequestRecord], None]]:
    """Gives a function to be called with each record whose request has ended.

    Args:
        says_start: a line says what begins, where there is no terminal for the bar.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    if says_start and not console.is_terminal:
        console.print(f"{time.strftime('%H:%M:%S')} {label}: {total} requests", markup=False, highlight=False, soft_wrap=True)
    num_failed = 0
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4) as progress:
        task = progress.add_task(label, total=total, failed=0)

        def ended(record: RequestRecord) -> None:
            nonlocal num_failed
            num_failed += not record.is_ok and record.error != INTERRUPTED
            progress.update(task, advance=1, failed=num_failed)

        yield ended


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[asyncio.Event]:
    """Gives an event that the first Ctrl-C sets; the second one ends the program as usual. Needs a running loop in the main thread."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
