"""`specwire bench serve`: one run of load on a coordinator."""

import asyncio
import dataclasses
import logging
import math
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.bench.arrivals import arrival_times
from specwire.bench.backend import grpc_backend
from specwire.bench.environment import describe_environment
from specwire.bench.metrics import ServeMetrics, measure, to_figures
from specwire.bench.progress import show_progress, stop_on_interrupt
from specwire.bench.report import check_output, make_console, print_differences, print_serve, request_figures, write_json
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.server_counts import Counts
from specwire.bench.statistics import DEFAULT_PERCENTILES, Objective
from specwire.bench.workload import Lengths, Prompt, PromptLine, file_prompts, read_prompt_file, repeat, synthetic_prompts
from specwire.client import AsyncClient
from specwire.errors import InvalidArgumentError, SpecwireError, UnavailableError, UnsupportedError
from specwire.messages import CoordinatorStatus
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EXIT_ERRORS = 1
EXIT_INTERRUPTED = 130
_NUM_SYNTHETIC = 100
_LENGTHS = Lengths(128, 128)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `specwire bench serve` was asked for.

    Args:
        prompts: a prompt file; None = made-up prompts of these lengths.
        num_prompts: requests that are measured; None = the file's prompts, or 100.
        request_rate: requests a second; infinite = all at once, or as max_concurrency allows.
        num_warmups: requests sent before, which count nowhere.
        seed: of arrivals, made-up prompts and sampling.
        params: sampling parameters of all requests.
        vocab_size: of made-up prompts where no tokenizer is served; 0 = the served one's.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    address: str
    prompts: Path | None = None
    chat: bool = False
    lengths: Lengths = _LENGTHS
    num_prompts: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    params: SamplingParams = SamplingParams()
    vocab_size: int = 0
    timeout_s: float | None = None
    max_retries: int = 0
    ready_timeout_s: float = 10.0
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES
    objective: Objective | None = None
    output: Path | None = None
    save_detailed: bool = False
    allow_errors: bool = False

    def __post_init__(self) -> None:
        arrival_times(0, self.request_rate, self.burstiness, self.seed)
        for flag, value, low in (
            ("--num-prompts", self.num_prompts, 1), ("--max-concurrency", self.max_concurrency, 1), ("--warmup", self.num_warmups, 0),
            ("--seed", self.seed, 0), ("--retries", self.max_retries, 0), ("--vocab-size", self.vocab_size, 0),
        ):  # fmt: skip
            if value is not None and value < low:
                raise InvalidArgumentError(f"{flag} is {value}, but must be at least {low}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidArgumentError(f"--timeout is {self.timeout_s}, but must be a positive number of seconds; leave it out to wait without limit")
        if self.chat and self.prompts is None:
            raise InvalidArgumentError("--chat needs texts; give a file with --prompts")


def run_serve(options: ServeOptions) -> int:
    """Runs the load, prints the figures and writes the report. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    check_output(options.output)
    lines = None if options.prompts is None else read_prompt_file(options.prompts)
    environment = describe_environment()
    model_id, run, server = run_loop(_run(options, lines))
    metrics = measure(run, options.percentiles, options.objective)
    console = make_console()
    print_serve(console, metrics, _setting_rows(options, model_id, len(run.records)))
    print_differences(console, Counts.of_records(run.records), server)
    if options.output is not None:
        write_json(options.output, make_report(options, environment, model_id, run, metrics, server))
    if run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_ERRORS if metrics.num_failed and not options.allow_errors else 0


def run_loop(main: Any) -> Any:
    """Runs a coroutine on uvloop: the load generator should never be what is measured."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _run(options: ServeOptions, lines: list[PromptLine] | None) -> tuple[str, LoadRun, Counts | None]:
    async with AsyncClient(options.address) as client:
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
            with show_progress("requests", len(prompts)) as ended:
                generator = LoadGenerator(send, time.perf_counter, max_concurrency=options.max_concurrency, on_end=ended)
                run = await generator.run(prompts, arrivals_s, stop)
        after = await get_status(client)
    server = Counts.of_status(before, after) if before and after else None
    return tokenizer.to_spec().model_id if tokenizer else "", run, server


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


def plan_arrivals(options: ServeOptions, num_prompts: int) -> list[float] | None:
    """When requests are due; None for a closed loop, which a limit of concurrent requests without a rate makes."""
    if math.isinf(options.request_rate) and options.max_concurrency is not None:
        return None
    return arrival_times(num_prompts, options.request_rate, options.burstiness, options.seed)


def check_warmup(run: LoadRun) -> None:
    """Raises what the warm-up failed with if all of it did: the run would measure nothing else."""
    failed = [record for record in run.records if not record.is_ok]
    if failed and len(failed) == len(run.records) and not run.interrupted:
        raise SpecwireError(f"all {len(failed)} requests of the warm-up failed; the first one with {failed[0].error}: {failed[0].error_text}")
    if failed:
        logger.warning("%d of %d requests of the warm-up failed; the first one with %s", len(failed), len(run.records), failed[0].error_text)


def make_report(
    options: ServeOptions, environment: dict[str, Any], model_id: str, run: LoadRun, metrics: ServeMetrics, server: Counts | None
) -> dict[str, Any]:
    """The JSON report: where and how it was measured, then figures by the names of `vllm bench serve`."""
    report = {
        "benchmark": "serve",
        **environment,
        "backend": "specwire-grpc",
        "model_id": model_id,
        "num_prompts": len(run.records),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "latencies_count_from": "sending" if plan_arrivals(options, 0) is None else "scheduled arrival",
        "settings": settings(options),
        **to_figures(metrics),
        "counted_by_client": dataclasses.asdict(Counts.of_records(run.records)),
        "counted_by_coordinator": None if server is None else dataclasses.asdict(server),
    }
    if options.save_detailed:
        report["requests"] = [request_figures(record, run.start_s) for record in run.records]
    return report


def settings(options: Any) -> dict[str, Any]:
    """All options as JSON has them."""
    values = dataclasses.asdict(options)
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _setting_rows(options: ServeOptions, model_id: str, num_sent: int) -> list[tuple[str, str]]:
    lengths = options.lengths
    if options.prompts is not None:
        workload = f"{options.prompts.name}{', chat' if options.chat else ''}, at most {lengths.output_len} tokens of output"
    else:
        spread = "" if lengths.distribution == "fixed" else f", {lengths.distribution}, spread {lengths.spread:g}"
        prefix = f"{lengths.prefix_len} shared + " if lengths.prefix_len else ""
        workload = f"synthetic: {prefix}{lengths.input_len} tokens in, {lengths.output_len} out{spread}"
    if plan_arrivals(options, 0) is None:
        arrivals = f"closed loop of {options.max_concurrency} (latencies count from sending)"
    else:
        rate = "all at once" if math.isinf(options.request_rate) else f"{options.request_rate:g} requests/s, burstiness {options.burstiness:g}"
        limit = f", at most {options.max_concurrency} at once" if options.max_concurrency else ""
        arrivals = f"{rate}{limit} (latencies count from the scheduled arrival)"
    return [
        ("coordinator", f"{options.address}{f', {model_id}' if model_id else ''}"),
        ("workload", workload),
        ("arrivals", arrivals),
        ("requests sent", f"{num_sent}, after {options.num_warmups} to warm up"),
    ]
