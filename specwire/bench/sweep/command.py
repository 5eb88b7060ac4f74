"""`specwire sweep`, from its options to its exit status."""

from specwire.bench.environment import describe_environment
from specwire.bench.folder import check_folder
from specwire.bench.report import FILE_WIDTH
from specwire.bench.serve import EXIT_ERRORS, EXIT_INTERRUPTED, run_loop
from specwire.bench.sweep.options import SweepOptions
from specwire.bench.sweep.report import FILES, print_sweep, write_sweep
from specwire.bench.sweep.run import sweep
from specwire.bench.sweep.stacks import SweptStack
from specwire.bench.workload import PromptLine, read_prompt_file
from specwire.console import make_console


def read_lines(options: SweepOptions) -> list[PromptLine] | None:
    """The prompts of the file, if there is one. Raises InvalidArgumentError if it, or the folder for the files, can't be used."""
    lines = None if options.load.prompts is None else read_prompt_file(options.load.prompts)
    check_folder(options.output, FILES)
    return lines


def run_sweep(options: SweepOptions, lines: list[PromptLine] | None, stack: SweptStack) -> int:
    """Measures, prints the table and writes the files. Returns the program's exit status.

    Raises:
        SpecwireError: nothing could be measured.
    """
    environment = describe_environment()
    result = run_loop(sweep(options, lines, stack))
    print_sweep(make_console(FILE_WIDTH), result)
    write_sweep(options, environment, result)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_ERRORS if any(cell.metrics.num_failed for cell in result.cells) and not options.load.allow_errors else 0
