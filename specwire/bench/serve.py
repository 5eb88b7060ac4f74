"""`specwire bench serve`: one run of load on a coordinator, or on a server with an OpenAI-compatible API."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from specwire.bench.environment import describe_environment
from specwire.bench.metrics import measure
from specwire.bench.progress import show_progress, stop_on_interrupt
from specwire.bench.record import INTERRUPTED
from specwire.bench.report import FILE_WIDTH, check_output, print_differences, print_serve, write_json
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.serve_options import ServeOptions, plan_arrivals
from specwire.bench.serve_report import ServeResult, make_report, setting_rows
from specwire.bench.server_counts import Counts
from specwire.bench.targets import Target
from specwire.bench.workload import PromptLine, read_prompt_file
from specwire.console import make_console
from specwire.errors import SpecwireError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130
_MAX_CPU_SHARE = 0.8


def read_lines(options: ServeOptions) -> list[PromptLine] | None:
    """The prompts of the file, if there is one. Raises InvalidArgumentError if it, or the file for the report, can't be used."""
    check_output(options.output)
    return None if options.prompts is None else read_prompt_file(options.prompts)


def run_serve(options: ServeOptions, lines: list[PromptLine] | None, make_target: Callable[[], Target]) -> int:
    """Runs the load on a server, prints the figures and writes the report. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    environment = describe_environment()
    result = run_loop(run_target(options, lines, make_target))
    run = result.run
    metrics = measure(run, options.percentiles, options.objective)
    if result.speculation is not None:
        metrics = dataclasses.replace(metrics, speculation=result.speculation)
    console = make_console(FILE_WIDTH)
    # Our own answers tell it; those of HTTP servers do not.
    tells_speculation = result.speculation is not None or not result.backend.startswith("openai")
    print_serve(console, metrics, setting_rows(options, result), tells_speculation=tells_speculation)
    print_differences(console, Counts.of_records(run.records), result.server)
    if result.cpu_share > _MAX_CPU_SHARE:
        logger.warning(
            "the load generator used %.0f%% of a core: latencies are partly its own; use a faster machine or less load", 100 * result.cpu_share
        )
    if options.output is not None:
        write_json(options.output, make_report(options, environment, result, metrics))
    if run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_ERRORS if metrics.num_failed and not options.allow_errors else 0


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine on uvloop: the load generator should never be what is measured."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def run_target(options: ServeOptions, lines: list[PromptLine] | None, make_target: Callable[[], Target]) -> ServeResult:
    """Puts the load on, and says what came of it. Needs the main thread, for Ctrl-C.

    Raises:
        SpecwireError: nothing could be measured.
    """
    async with make_target() as target:
        await target.connect(options.ready_timeout_s)
        prompts, warmups = target.workload(options, lines)
        arrivals_s = plan_arrivals(options, len(prompts))
        send = target.sender(options)
        with stop_on_interrupt() as stop:
            if warmups:
                with show_progress("warm-up", len(warmups)) as ended:
                    generator = LoadGenerator(send, time.perf_counter, max_concurrency=options.max_concurrency, on_end=ended)
                    check_warmup(await generator.run(warmups, None, stop))
            await target.begin()
            cpu_s = -time.process_time()
            with show_progress("requests", len(prompts)) as ended:
                generator = LoadGenerator(
                    send, time.perf_counter, max_concurrency=options.max_concurrency, keep_tokens=options.save_detailed, on_end=ended
                )
                run = await generator.run(prompts, arrivals_s, stop)
            cpu_s += time.process_time()
        warn_of_failures(run)
        side = await target.end()
        texts = [target.text(record.token_ids) for record in run.records] if options.save_detailed else []
    cpu_share = cpu_s / max(run.end_s - run.start_s, 1e-9)
    return ServeResult(target.backend, target.address, target.model_id, run, side.counts, side.speculation, cpu_share, texts)


def check_warmup(run: LoadRun) -> None:
    """Raises what the warm-up failed with if all of it did: the run would measure nothing else."""
    failed = [record for record in run.records if not record.is_ok]
    if failed and len(failed) == len(run.records) and not run.interrupted:
        raise SpecwireError(f"all {len(failed)} requests of the warm-up failed; the first one with {failed[0].error}: {failed[0].error_text}")
    if failed:
        logger.warning("%d of %d requests of the warm-up failed; the first one with %s", len(failed), len(run.records), failed[0].error_text)


def warn_of_failures(run: LoadRun) -> None:
    """Says why requests failed, if some did: once for each kind."""
    failed = [record for record in run.records if not record.is_ok and record.error != INTERRUPTED]
    first = {record.error: record.error_text for record in reversed(failed)}
    for kind, count in Counter(record.error for record in failed).most_common():
        logger.warning("%d of %d requests failed with %s; the first one: %s", count, len(run.records), kind, first[kind])
