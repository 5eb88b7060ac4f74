"""`specwire bench accept`: what of a prompt file's drafts is accepted, by category and business weight."""

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specwire.bench.accept_report import print_accept, to_json
from specwire.bench.acceptance import AcceptReport, find_differences, measure_acceptance
from specwire.bench.backend import grpc_backend
from specwire.bench.environment import describe_environment
from specwire.bench.metrics import measure
from specwire.bench.progress import show_progress, stop_on_interrupt
from specwire.bench.report import FILE_WIDTH, check_output, write_json
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.serve import EXIT_ERRORS, EXIT_INTERRUPTED, run_loop, warn_of_failures
from specwire.bench.serve_report import settings
from specwire.bench.targets import connect
from specwire.bench.workload import Prompt, PromptLine, file_prompts, read_prompt_file
from specwire.client import AsyncClient
from specwire.console import make_console
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AcceptOptions:
    """What `specwire bench accept` was asked for.

    Args:
        address: for the report; the client is made by the caller.
        categories: of the file, in this order; empty = all.
        weights: how much each category counts in the total, spread evenly over its prompts; empty = the prompts' own weights.
        num_prompts: most prompts of each category; None = all.
        max_tokens: most tokens of an answer.
        params: sampling parameters; each prompt gets a seed of its own, params.seed + its number.
        baseline: run everything again without drafts and compare the tokens.

    Raises:
        InvalidArgumentError: a value out of range.
    """

    address: str
    prompts: Path
    chat: bool = False
    categories: tuple[str, ...] = ()
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_prompts: int | None = None
    max_tokens: int = 256
    params: SamplingParams = SamplingParams()
    max_concurrency: int = 8
    timeout_s: float | None = None
    max_retries: int = 0
    ready_timeout_s: float = 10.0
    baseline: bool = False
    output: Path | None = None
    allow_errors: bool = False

    def __post_init__(self) -> None:
        for flag, value in (("--num-prompts", self.num_prompts), ("--output-len", self.max_tokens), ("--max-concurrency", self.max_concurrency)):
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{flag} is {value}, but must be at least 1")


def parse_weights(text: str) -> dict[str, float]:
    """From `chat=3,coding=1`. Raises InvalidArgumentError."""
    weights = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or not 0 <= weight < math.inf:
            raise InvalidArgumentError(f"--weights has {part!r}, but must be categories with numbers from 0 on, such as chat=3,coding=1")
        weights[name] = weight
    if weights and not any(weights.values()):
        raise InvalidArgumentError(f"--weights is {text!r}, which gives nothing any weight; give at least one category more than 0")
    return weights


def choose_lines(lines: Sequence[PromptLine], options: AcceptOptions) -> list[PromptLine]:
    """The lines that are asked for, category by category in the order of their first line, with their weights.

    Raises:
        InvalidArgumentError: a category that the file does not have, or one without a weight.
    """
    by_category: dict[str, list[PromptLine]] = {}
    for line in lines:
        by_category.setdefault(line.category, []).append(line)
    for name in (*options.categories, *options.weights):
        if name not in by_category:
            raise InvalidArgumentError(f"the prompt file has no category {name!r}; it has {', '.join(map(repr, by_category))}")
    chosen = []
    for category in options.categories or by_category:
        part = by_category[category][: options.num_prompts]
        if options.weights:
            if category not in options.weights:
                raise InvalidArgumentError(f"--weights names no weight of the category {category!r}; give it one, or 0 to leave it out of the total")
            weight = options.weights[category] / len(part)
            part = [dataclasses.replace(line, weight=weight) for line in part]
        chosen += part
    return chosen


def read_lines(options: AcceptOptions) -> list[PromptLine]:
    """The prompts that are asked for. Raises InvalidArgumentError if a file can't be used, or as of `choose_lines`."""
    check_output(options.output)
    return choose_lines(read_prompt_file(options.prompts), options)


def run_accept(options: AcceptOptions, lines: list[PromptLine], make_client: Callable[[], AsyncClient]) -> int:
    """Runs the prompts with a client, prints the figures and writes the report. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    environment = describe_environment()
    report = run_loop(_run(options, lines, make_client))
    print_accept(make_console(FILE_WIDTH), report)
    if options.output is not None:
        write_json(options.output, {"benchmark": "accept", **environment, "settings": settings(options), **to_json(report)})
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_ERRORS if (report.num_failed or report.differences) and not options.allow_errors else 0


async def _run(options: AcceptOptions, lines: list[PromptLine], make_client: Callable[[], AsyncClient]) -> AcceptReport:
    async with make_client() as client:
        tokenizer = await connect(client, options.ready_timeout_s)
        if tokenizer is None:
            raise InvalidArgumentError("the coordinator serves no tokenizer, so a prompt file is of no use")
        prompts = file_prompts(lines, tokenizer, options.max_tokens, as_chat=options.chat)
        with stop_on_interrupt() as stop:

            async def run(label: str, params: SamplingParams) -> LoadRun:
                send = grpc_backend(
                    client, params, label=f"accept-{secrets.token_hex(4)}", timeout_s=options.timeout_s, max_retries=options.max_retries,
                    report_drafts=True,
                )  # fmt: skip
                with show_progress(label, len(prompts)) as ended:
                    generator = LoadGenerator(send, time.perf_counter, max_concurrency=options.max_concurrency, keep_tokens=True, on_end=ended)
                    made = await generator.run(prompts, None, stop)
                warn_of_failures(made)
                return made

            drafted = await run("with drafts", options.params)
            plain = await run("without drafts", options.params.replace(max_draft_tokens=0)) if options.baseline and not drafted.interrupted else None
    return make_accept_report(prompts, tokenizer.to_spec().model_id, drafted, plain)


def make_accept_report(prompts: Sequence[Prompt], model_id: str, drafted: LoadRun, plain: LoadRun | None) -> AcceptReport:
    """What two runs of the same prompts say; plain is None where there was only one."""
    totals = [measure(run, (50.0,)) for run in (drafted, plain) if run is not None]
    errors: dict[str, int] = {}
    for total in totals:
        for kind, count in total.errors.items():
            errors[kind] = errors.get(kind, 0) + count
    done = [record for record in drafted.records if record.is_ok]
    return AcceptReport(
        model_id=model_id,
        groups=measure_acceptance([(prompts[record.index], record) for record in done]),
        num_failed=sum(errors.values()),
        errors=errors,
        interrupted=drafted.interrupted or (plain is not None and plain.interrupted),
        num_compared=None if plain is None else len({record.index for record in done} & {record.index for record in plain.records if record.is_ok}),
        differences=[] if plain is None else find_differences(prompts, drafted.records, plain.records),
    )
