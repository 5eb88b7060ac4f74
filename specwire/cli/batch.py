"""`specwire batch`: many prompts from a file of JSON lines, results as JSON lines."""

import asyncio
import contextlib
import io
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specwire.cli.batch_lines import Job, Writer, answer_record, answered_ids, error_record, read_jobs
from specwire.client import AsyncClient, BatchItem
from specwire.client.arguments import make_params
from specwire.client.batch import read_in_thread
from specwire.errors import InvalidArgumentError, SpecwireError, UnauthenticatedError, UnavailableError


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What `specwire batch` was asked for.

    Args:
        source: file of requests; None = standard input.
        output: file of results; None = standard output.
        max_concurrency: most requests that run at once.
        keep_order: results in the order of the requests instead of their ends.
        resume: leave out what the output answers already, and append to it.
        defaults: sampling parameters where a line has none of its own.

    Raises:
        InvalidArgumentError: a number out of range, or files that do not fit.
    """

    source: Path | None
    output: Path | None = None
    max_concurrency: int = 32
    keep_order: bool = False
    resume: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.max_concurrency <= 4096:
            raise InvalidArgumentError(f"--max-concurrency is {self.max_concurrency}, but must be from 1 to 4096")
        if self.source is None and sys.stdin is None:
            raise InvalidArgumentError("the requests are to come from standard input, which is closed; pipe them in, or name a file")
        if self.source is not None and not self.source.is_file():
            raise InvalidArgumentError(f"there is no file {self.source}; name a file of JSON lines, or - for standard input")
        if self.output is not None and self.source is not None and self.output.exists() and self.output.samefile(self.source):
            raise InvalidArgumentError(f"--output {self.output} is the file of the requests; name another one")
        if self.resume and self.output is not None and self.output.exists() and not self.output.is_file():
            raise InvalidArgumentError(f"--output {self.output} is no regular file, which --resume could read; name another one")
        if self.resume and self.output is None:
            raise InvalidArgumentError("--resume needs --output: it goes on with that file")
        if self.output is not None and self.output.exists() and not self.resume:
            raise InvalidArgumentError(f"{self.output} exists; go on with it by --resume, or name another --output")
        if self.output is not None and not self.output.absolute().parent.is_dir():
            raise InvalidArgumentError(f"there is no folder {self.output.absolute().parent}; make it, or name another --output")


@dataclass(slots=True)
class Tally:
    """How far a batch is."""

    num_answered: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    on_change: Callable[[], None] = lambda: None


def run_batch(make_client: Callable[[], AsyncClient], options: BatchOptions) -> Tally:
    """Answers every line, with progress and a summary on stderr.

    Raises:
        InvalidArgumentError: the output to be resumed is none.
        UnavailableError: there is no coordinator, or it went away; what was answered before is written.
    """
    answered = answered_ids(options.output) if options.output is not None and options.resume else set()
    num_jobs = None if options.source is None else _num_lines(options.source) - len(answered)
    tally, started = Tally(), time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            source = _standard_input() if options.source is None else stack.enter_context(options.source.open("rb"))
            output = sys.stdout if options.output is None else stack.enter_context(options.output.open("a", encoding="utf-8"))
            stack.enter_context(_progress(tally, num_jobs))
            batch = _Batch(read_jobs(source, answered), Writer(output, keep_order=options.keep_order), options.defaults, tally)
            asyncio.run(batch.run(make_client, options.max_concurrency))
    finally:
        typer.echo(summarize(tally, len(answered), time.monotonic() - started), err=True)
    return tally


def summarize(tally: Tally, num_skipped: int, elapsed_s: float) -> str:
    """One line for people."""
    skipped = f", {num_skipped} skipped" if num_skipped else ""
    return (
        f"{tally.num_answered} answered, {tally.num_failed} failed{skipped}: "
        f"{tally.num_tokens} tokens in {elapsed_s:.1f} s ({tally.num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s)"
    )


class _Batch:
    """Lines are read as they can be sent: of a file of any size only so many are in memory."""

    def __init__(self, jobs: Iterator[Job], writer: Writer, defaults: Mapping[str, Any], tally: Tally) -> None:
        self._jobs = jobs
        self._writer = writer
        self._defaults = defaults
        self._tally = tally
        self._sent: dict[int, tuple[int, Job]] = {}
        """By index in the batch: those that are not answered, and where they stand among all jobs."""

    async def run(self, make_client: Callable[[], AsyncClient], max_concurrency: int) -> None:
        async with make_client() as client, client.generate_batch(self._items(), max_concurrency=max_concurrency) as batch:
            async for sent, outcome in batch:
                if isinstance(outcome, (UnavailableError, UnauthenticatedError)):
                    raise outcome  # what comes next would fail alike
                index, job = self._sent.pop(sent)
                if isinstance(outcome, SpecwireError):
                    self._failed(index, job, outcome)
                    continue
                self._tally.num_answered += 1
                self._tally.num_tokens += sum(len(choice.token_ids) for choice in outcome.choices)
                self._write(index, answer_record(job, outcome))

    async def _items(self) -> AsyncIterator[BatchItem]:
        num_sent = index = 0
        async for job in read_in_thread(self._jobs):  # standard input may keep its next line waiting
            try:
                item = self._item(job)
            except SpecwireError as error:
                self._failed(index, job, error)
            else:
                self._sent[num_sent] = index, job
                num_sent += 1
                yield item
            index += 1

    def _item(self, job: Job) -> BatchItem:
        if job.error is not None:
            raise job.error
        sampling = {**self._defaults, **job.sampling}
        timeout, request_id = sampling.pop("timeout", None), sampling.pop("request_id", "")
        return BatchItem(job.prompt, make_params(None, sampling), timeout, request_id)

    def _failed(self, index: int, job: Job, error: SpecwireError) -> None:
        self._tally.num_failed += 1
        self._write(index, error_record(job, error))

    def _write(self, index: int, record: dict[str, Any]) -> None:
        self._writer.write(index, record)
        self._tally.on_change()


def _standard_input() -> IO[bytes]:
    """A buffer of our own where there is a file behind it: a program can't end while a thread waits in the interpreter's one."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer


def _num_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


@contextlib.contextmanager
def _progress(tally: Tally, num_jobs: int | None) -> Iterator[None]:
    """A bar on stderr while the body runs, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("batch", total=num_jobs, failed=0)
        tally.on_change = lambda: progress.update(bar, completed=tally.num_answered + tally.num_failed, failed=tally.num_failed)
        yield
