"""`specwire bench serve`: one run of load on a coordinator."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from specwire.bench.backend import grpc_backend
from specwire.bench.environment import describe_environment
from specwire.bench.metrics import measure
from specwire.bench.progress import show_progress, stop_on_interrupt
from specwire.bench.report import FILE_WIDTH, check_output, print_differences, print_serve, write_json
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.serve_options import ServeOptions, plan_arrivals
from specwire.bench.serve_report import ServeResult, make_report, setting_rows
from specwire.bench.server_counts import Counts
from specwire.bench.workload import Prompt, PromptLine, file_prompts, read_prompt_file, repeat, synthetic_prompts
from specwire.client import AsyncClient
from specwire.console import make_console
from specwire.errors import InvalidArgumentError, SpecwireError, UnavailableError, UnsupportedError
from specwire.messages import CoordinatorStatus
from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130
_NUM_SYNTHETIC = 100
_MAX_CPU_SHARE = 0.8


def read_lines(options: ServeOptions) -> list[PromptLine] | None:
    """The prompts of the file, if there is one. Raises InvalidArgumentError if it, or the file for the report, can't be used."""
    check_output(options.output)
    return None if options.prompts is None else read_prompt_file(options.prompts)


def run_serve(options: ServeOptions, lines: list[PromptLine] | None, make_client: Callable[[], AsyncClient]) -> int:
    """Runs the load with a client, prints the figures and writes the report. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    environment = describe_environment()
    result = run_loop(_run(options, lines, make_client))
    run = result.run
    metrics = measure(run, options.percentiles, options.objective)
    console = make_console(FILE_WIDTH)
    print_serve(console, metrics, setting_rows(options, result))
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


async def _run(options: ServeOptions, lines: list[PromptLine] | None, make_client: Callable[[], AsyncClient]) -> ServeResult:
    async with make_client() as client:
        tokenizer = await connect(client, options.ready_timeout_s)
        prompts, warmups = make_workload(options, lines, tokenizer)
        arrivals_s = plan_arrivals(options, len(prompts))
        send = grpc_backend(
            client, options.params, label=f"bench-{secrets.token_hex(4)}", timeout_s=options.timeout_s, max_retries=options.max_retries
        )  # fmt: skip
        with stop_on_interrupt() as stop:
            if warmups:
                with show_progress("warm-up", len(warmups)) as ended:
                    generator = LoadGenerator(send, time.perf_counter, max_concurrency=options.max_concurrency, on_end=ended)
                    check_warmup(await generator.run(warmups, None, stop))
            before = await get_status(client)
            cpu_s = -time.process_time()
            with show_progress("requests", len(prompts)) as ended:
                generator = LoadGenerator(send, time.perf_counter, max_concurrency=options.max_concurrency, on_end=ended)
                run = await generator.run(prompts, arrivals_s, stop)
            cpu_s += time.process_time()
        after = await get_status(client)
    server = Counts.of_status(before, after) if before and after else None
    return ServeResult(tokenizer.to_spec().model_id if tokenizer else "", run, server, cpu_s / max(run.end_s - run.start_s, 1e-9))


async def get_status(client: AsyncClient) -> CoordinatorStatus | None:
    """The coordinator's counters; without them there is only one side to count."""
    try:
        return await client.get_status()
    except SpecwireError as error:
        logger.warning("the coordinator's own counters are left out: %s", error)
        return None


async def connect(client: AsyncClient, timeout_s: float) -> Tokenizer | None:
    """Waits until the coordinator serves; its tokenizer, if it has one.

    Raises:
        UnavailableError: it does not serve in time.
    """
    try:
        await client.wait_ready(timeout_s)
        return await client.get_tokenizer()
    except UnsupportedError:
        return None
    except UnavailableError as error:
        raise UnavailableError(f"{error} (`specwire up` starts one on this machine)") from error


def make_workload(options: ServeOptions, lines: list[PromptLine] | None, tokenizer: Tokenizer | None) -> tuple[list[Prompt], list[Prompt]]:
    """What is measured, and what is sent before it to warm up: other prompts, as far as there are any, so that no measured one is in a cache.

    Raises:
        InvalidArgumentError: prompts can't be made without a tokenizer.
    """
    if lines is not None:
        if tokenizer is None:
            raise InvalidArgumentError("the coordinator serves no tokenizer, so a prompt file is of no use; leave --prompts out")
        prompts = file_prompts(lines, tokenizer, options.lengths.output_len, as_chat=options.chat)
        count = options.num_prompts or len(prompts)
        return repeat(prompts, count), repeat(prompts, options.num_warmups, first=count)
    count = options.num_prompts or _NUM_SYNTHETIC
    allowed_ids = allowed_token_ids(tokenizer, options.vocab_size)
    prompts = synthetic_prompts(count + options.num_warmups, options.lengths, allowed_ids, options.seed)
    return prompts[:count], prompts[count:]


def allowed_token_ids(tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids that made-up prompts may hold: all but those that begin or end a text.

    Raises:
        InvalidArgumentError: the size of the vocabulary is not known, or smaller than said.
    """
    if tokenizer is None:
        if not vocab_size:
            raise InvalidArgumentError("the coordinator serves no tokenizer, so the size of its vocabulary must be given with --vocab-size")
        return list(range(vocab_size))
    if vocab_size > tokenizer.vocab_size:
        raise InvalidArgumentError(f"--vocab-size is {vocab_size}, but the served vocabulary has {tokenizer.vocab_size} ids; leave it out")
    special = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
    return [token_id for token_id in range(vocab_size or tokenizer.vocab_size) if token_id not in special]


def check_warmup(run: LoadRun) -> None:
    """Raises what the warm-up failed with if all of it did: the run would measure nothing else."""
    failed = [record for record in run.records if not record.is_ok]
    if failed and len(failed) == len(run.records) and not run.interrupted:
        raise SpecwireError(f"all {len(failed)} requests of the warm-up failed; the first one with {failed[0].error}: {failed[0].error_text}")
    if failed:
        logger.warning("%d of %d requests of the warm-up failed; the first one with %s", len(failed), len(run.records), failed[0].error_text)
