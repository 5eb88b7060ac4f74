"""The progress bar of a batch: prompts and tokens a second, on standard error where that is a terminal or a notebook."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specwire.offline.outputs import RequestOutput


@contextlib.contextmanager
def show_progress(total: int, *, wanted: bool, console: Console | None = None) -> Iterator[Callable[[RequestOutput], None]]:
    """Gives a function to be called with each output when it is there."""
    if not wanted:
        yield lambda _: None
        return
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    num_input = num_output = num_failed = 0
    start_s = time.monotonic()
    with Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter), refresh_per_second=4) as progress:
        task = progress.add_task("prompts", total=total, speed="")

        def ended(output: RequestOutput) -> None:
            nonlocal num_input, num_output, num_failed
            if output.metrics is None:
                num_failed += 1
            else:
                num_input += output.metrics.num_prompt_tokens
                num_output += output.metrics.num_generation_tokens
            elapsed_s = max(time.monotonic() - start_s, 1e-9)
            failed = f"{num_failed} failed, " if num_failed else ""
            speed = f"{failed}{num_input / elapsed_s:.0f} tokens/s in, {num_output / elapsed_s:.0f} tokens/s out"
            progress.update(task, advance=1, speed=speed)

        yield ended
