"""A training as the command line shows it: a progress bar on a terminal, else a line now and then; figures at the end."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specwire.console import make_console, make_table
from specwire.engine.runner import set_num_threads
from specwire.train.evaluate import Evaluation, Walk
from specwire.train.run import PHASES, TrainOptions, train

_LINE_EVERY_S = 10.0


def run_train(options: TrainOptions, num_threads: int) -> bool:
    """Trains with progress on standard error and the result on standard output. Returns whether the run is finished."""
    set_num_threads(num_threads)
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4) as progress:
        result = train(options, _Shown(progress, console).show)
    out = make_console(120)
    if result.head is None or result.evaluation is None:
        out.print(f"stopped after {options.max_seconds:g} s in {result.phase}; the same command goes on")
        return False
    out.print(
        make_table(
            ["answers", "sequences", "tokens per step", "first i drafts accepted"], _rows(result.evaluation, options.data.temperature), num_left=1
        )
    )
    if result.evaluation.calibration_error is not None:
        out.print(f"expected calibration error {result.evaluation.calibration_error:.1%}")
    out.print(f"head: {result.head}; curve: {options.output / 'curve.json'}")
    return True


class _Shown:
    """A bar a phase; where no terminal is, a line as a phase begins and ends and every ten seconds."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._tasks: dict[str, TaskID] = {}
        self._last_line = 0.0

    def show(self, phase: str, done: float, total: float, note: str) -> None:
        assert phase in PHASES, f"no phase {phase!r}"
        is_new = phase not in self._tasks
        if is_new:
            self._tasks[phase] = self._progress.add_task(phase, total=total, note=note)
        self._progress.update(self._tasks[phase], completed=done, total=total, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and (is_new or done >= total or now - self._last_line >= _LINE_EVERY_S):
            self._last_line = now
            self._console.print(f"{phase} {done / total:.0%}{f' ({note})' if note else ''}")


def _rows(evaluation: Evaluation, temperature: float) -> list[list[str]]:
    return [_row("greedy", evaluation.greedy), _row(f"temperature {temperature:g}", evaluation.sampled)]


def _row(name: str, walk: Walk) -> list[str]:
    shares = " ".join(f"{share:.2f}" for share in walk.acceptance_by_position)
    return [name, str(walk.num_sequences), f"{walk.acceptance_length:.2f}", shares] if walk.num_sequences else [name, "0", "–", "–"]
