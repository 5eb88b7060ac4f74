"""`specwire advise`: measures a running stack with the user's prompts, decides, and writes what to configure."""

import datetime
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specwire.advise.advice import Advice, Measured, config_piece, make_advice
from specwire.advise.drafts import AnswerDrafts, calibrated_survivals, expected_yield, synthetic_yield
from specwire.advise.measure import Measuring, hidden_drafts, step_points
from specwire.advise.options import AdviseOptions
from specwire.advise.picture import draw
from specwire.advise.report import print_advice, to_json
from specwire.advise.steps import StepTimes, cost_of_status
from specwire.bench.accept import choose_lines, make_accept_report
from specwire.bench.accept_report import print_accept
from specwire.bench.accept_report import to_json as acceptance_to_json
from specwire.bench.acceptance import AcceptReport
from specwire.bench.environment import describe_environment
from specwire.bench.progress import stop_on_interrupt
from specwire.bench.report import FILE_WIDTH, write_json
from specwire.bench.serve import EXIT_ERRORS, EXIT_INTERRUPTED, run_loop
from specwire.bench.serve_report import settings
from specwire.bench.targets import connect
from specwire.bench.workload import PromptLine, file_prompts, read_prompt_file
from specwire.client import AsyncClient
from specwire.console import make_console
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.messages import CoordinatorStatus

logger = logging.getLogger(__name__)

JSON_NAME, CONFIG_NAME, PICTURE_NAME = "advice.json", "specwire.yaml", "advice.png"


@dataclass(frozen=True, slots=True)
class AdviseResult:
    """measured: None if Ctrl-C came before enough was measured. asked_most: K that was asked for."""

    acceptance: AcceptReport
    measured: Measured | None
    asked_most: int


def read_lines(options: AdviseOptions) -> list[PromptLine]:
    """The prompts. Raises InvalidArgumentError if they can't be used, or the folder can't be made or would lose a file."""
    lines = choose_lines(read_prompt_file(options.accept.prompts), options.accept)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / JSON_NAME).open("a", encoding="utf-8").close()
    except OSError as error:
        raise InvalidArgumentError(f"--output {options.output} can't be written to: {error.strerror}; choose another folder") from error
    return lines


def run_advise(options: AdviseOptions, lines: list[PromptLine], make_client: Callable[[], AsyncClient]) -> int:
    """Measures, prints the advice and writes it into the folder. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    environment = describe_environment()
    result = run_loop(_run(options, lines, make_client))
    console = make_console(FILE_WIDTH)
    print_accept(console, result.acceptance)
    if result.measured is None:
        console.print("interrupted before steps were measured: there is no advice", markup=False)
        return EXIT_INTERRUPTED
    measured = result.measured
    advice = make_advice(measured, options.min_gain, result.asked_most)
    print_advice(console, measured, advice)
    piece = config_piece(advice, measured, options.accept.prompts.name, datetime.datetime.now(datetime.UTC).date())
    console.print(f"\n{piece}", markup=False)
    written = _write(options.output, piece, result, measured, advice, {"benchmark": "advise", **environment, "settings": settings(options)})
    console.print(f"written: {', '.join(map(str, written))}", markup=False)
    return EXIT_ERRORS if result.acceptance.num_failed and not options.accept.allow_errors else 0


def _write(folder: Path, piece: str, result: AdviseResult, measured: Measured, advice: Advice, head: dict[str, object]) -> list[Path]:
    paths = [folder / JSON_NAME, folder / CONFIG_NAME]
    write_json(paths[0], {**head, **to_json(measured, advice), "acceptance": acceptance_to_json(result.acceptance)})
    paths[1].write_text(piece, encoding="utf-8")
    if measured.times is None:
        return paths
    try:
        draw(folder / PICTURE_NAME, measured, advice, result.acceptance)
    except ModuleNotFoundError as error:
        logger.warning("there is no picture, since %s is not installed: `pip install 'specwire[plots]'` brings it", error.name)
        return paths
    return [*paths, folder / PICTURE_NAME]


async def _run(options: AdviseOptions, lines: list[PromptLine], make_client: Callable[[], AsyncClient]) -> AdviseResult:
    async with make_client() as client:
        tokenizer = await connect(client, options.accept.ready_timeout_s)
        if tokenizer is None:
            raise InvalidArgumentError("the coordinator serves no tokenizer, so a prompt file is of no use")
        prompts = file_prompts(lines, tokenizer, options.accept.max_tokens, as_chat=options.accept.chat)
        status = await client.get_status()
        for reservation in (reservations := hidden_drafts(status)):
            logger.warning("%s", reservation)
        with stop_on_interrupt() as stop:
            measuring = Measuring(client, options, status, stop)
            drafted = await measuring.acceptance(prompts)
            report = make_accept_report(prompts, tokenizer.to_spec().model_id, drafted, None)
            done = [record for record in drafted.records if record.is_ok]
            if drafted.interrupted:
                return AdviseResult(report, None, measuring.most)
            if not done:
                raise SpecwireError(f"all {report.num_failed} requests failed: {drafted.records[0].error_text}")
            answers = [AnswerDrafts.of(prompts[record.index], record) for record in done]
            most = max((count for answer in answers for count in answer.num_drafts), default=0)
            is_synthetic = any(record.spec is not None and record.spec.synthetic for record in done)
            drafts = (synthetic_yield if is_synthetic else expected_yield)(answers, most)
            started_s = time.perf_counter()
            points = step_points(await measuring.steps(prompts), measuring.num_lanes) if most else []
            logger.info("measured %d kinds of steps in %.1f s", len(points), time.perf_counter() - started_s)
            if stop.is_set():
                return AdviseResult(report, None, measuring.most)
    context_len = round(sum(record.num_prompt_tokens + record.num_output_tokens / 2 for record in done) / len(done))
    has_drafts = any(point.num_requested for point in points)
    measured = Measured(
        model_id=report.model_id,
        method=_method(status),
        max_num_seqs=status.max_num_seqs,
        drafts=drafts,
        survival=calibrated_survivals(answers, max(most, 1)),
        times=StepTimes(cost_of_status(status), points, context_len) if has_drafts else None,
        points=tuple(points),
        is_synthetic=is_synthetic,
        reservations=tuple(reservations),
    )
    return AdviseResult(report, measured, measuring.most)


def _method(status: CoordinatorStatus) -> str:
    return ", ".join(dict.fromkeys(drafter.method for drafter in status.drafters if drafter.is_connected))
