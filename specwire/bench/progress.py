"""A progress bar on standard error, where that is a terminal, and Ctrl-C as the wish to see what there is."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specwire.bench.record import INTERRUPTED, RequestRecord


@contextlib.contextmanager
def show_progress(label: str, total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Gives a function to be called with each record whose request has ended."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
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
