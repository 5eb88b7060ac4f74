"""`specwire advise`: measures running stacks with the user's prompts, decides, and writes what to configure."""

import datetime
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from specwire.advise.configuration import canary_file, config_file
from specwire.advise.markdown import to_markdown
from specwire.advise.online_picture import draw_online
from specwire.advise.options import AdviseOptions
from specwire.advise.picture import draw
from specwire.advise.report import print_findings, to_json
from specwire.advise.run import Findings, Stack, run_steps
from specwire.bench.accept import choose_lines
from specwire.bench.environment import describe_environment
from specwire.bench.folder import check_folder, whole_file
from specwire.bench.report import FILE_WIDTH, write_json
from specwire.bench.serve import EXIT_ERRORS, EXIT_INTERRUPTED, run_loop
from specwire.bench.serve_report import settings
from specwire.bench.workload import PromptLine, read_prompt_file
from specwire.console import make_console
from specwire.extras import not_installed

__all__ = ["Stack", "read_lines", "run_advise"]

logger = logging.getLogger(__name__)

JSON_NAME, REPORT_NAME, CONFIG_NAME, CANARY_NAME = "advice.json", "advice.md", "specwire.yaml", "canary.yaml"
PICTURE_NAME, ONLINE_NAME = "advice.png", "online.png"


def read_lines(options: AdviseOptions) -> list[PromptLine]:
    """The prompts. Raises InvalidArgumentError if they can't be used, or the folder can't be made or would lose a file."""
    lines = choose_lines(read_prompt_file(options.accept.prompts), options.accept)
    check_folder(options.output, (JSON_NAME, REPORT_NAME, CONFIG_NAME, CANARY_NAME, PICTURE_NAME, ONLINE_NAME))
    return lines


def run_advise(options: AdviseOptions, lines: list[PromptLine], stacks: Sequence[Stack]) -> int:
    """Measures, prints the advice and writes it into the folder. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    environment = describe_environment()
    findings = run_loop(run_steps(options, lines, stacks))
    console = make_console(FILE_WIDTH)
    if findings is None:
        console.print("interrupted before everything was measured: there is no advice", markup=False)
        return EXIT_INTERRUPTED
    print_findings(console, findings)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    title = f"specwire advise, {day}: {options.accept.prompts.name} with {findings.chosen.method} on {findings.model_id or 'the model'}"
    written = _write_files(options, findings, title, {"benchmark": "advise", **environment, "settings": settings(options)})
    config = written[1].read_text(encoding="utf-8")
    console.print(f"\n{config}", markup=False, soft_wrap=True)  # a long comment would go on in a line without #
    console.print(f"written: {', '.join(map(str, written))}", markup=False)
    return EXIT_ERRORS if findings.acceptance.num_failed and not options.accept.allow_errors else 0


def _write_files(options: AdviseOptions, findings: Findings, title: str, head: dict[str, object]) -> list[Path]:
    """The JSON file, the configuration, and the rest."""
    folder, decision, advice = options.output, findings.decision, findings.advice
    written = [folder / JSON_NAME, folder / CONFIG_NAME]
    with whole_file(written[0]) as file:
        write_json(file, {**head, **to_json(findings)})
    comments = [title, decision.headline, *decision.reasons[1:], *decision.doubts, *(advice.notes if advice is not None else findings.reservations)]
    keys = findings.keys if decision.verdict.is_off else {**findings.drafter_keys, **findings.keys}
    _write_text(written[1], config_file(keys, comments))
    canary = folder / CANARY_NAME
    if findings.plan is not None:
        _write_text(canary, canary_file(keys, findings.plan, [title, *findings.plan.steps]))
        written.append(canary)
    else:
        canary.unlink(missing_ok=True)  # of an earlier run, which said something else
    pictures = _draw(folder, findings, options, title)
    report = folder / REPORT_NAME
    _write_text(report, to_markdown(findings, title, [path.name for path in pictures]))
    return [*written, report, *pictures]


def _write_text(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def _draw(folder: Path, findings: Findings, options: AdviseOptions, title: str) -> list[Path]:
    """Pictures of what was measured; none, with a warning, where matplotlib is not installed."""
    wanted: list[tuple[Path, Callable[[Path], None]]] = []
    measured, advice, low, high = findings.measured, findings.advice, findings.low, findings.high
    if measured is not None and advice is not None and measured.times is not None:
        wanted.append((folder / PICTURE_NAME, lambda path: draw(path, measured, advice, findings.acceptance)))
    if low is not None and high is not None:
        wanted.append((folder / ONLINE_NAME, lambda path: draw_online(path, (low, high), options.thresholds, title)))
    try:
        for path, write in wanted:
            with whole_file(path) as file:
                write(file)
    except ModuleNotFoundError as error:
        logger.warning("there is no picture, since %s", not_installed([str(error.name)], "plots"))
        return []
    return [path for path, _ in wanted]
