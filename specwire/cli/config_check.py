"""`specwire config check`: everything that is wrong with a file, at once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

from specwire.cli.config import check_ports, describe_capacity
from specwire.config_file import inspect_config_file
from specwire.config_layers import SPECULATIVE, ConfigError, Problem, Resolved, resolve
from specwire.config_reader import SECTIONS, Reading
from specwire.errors import InvalidArgumentError
from specwire.stack.checks import check_model
from specwire.stack.resolve import resolve_drafters, resolve_stack

Result = TypeVar("Result")


def run_check(path: Path) -> bool:
    """Prints every problem of the file, and on stderr what is none on another machine; returns whether there is no problem."""
    try:
        problems, warnings = find_problems(inspect_config_file(path))
    except ConfigError as error:
        problems, warnings = error.problems, ()
    for warning in warnings:
        typer.echo(f"{warning} (`specwire up` refuses it here)", err=True)
    for problem in problems:
        typer.echo(problem)
    if not problems:
        typer.echo(f"{path}: no problems")
    return not problems


def find_problems(reading: Reading) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """What no service can be started with, and the models that are not on this machine; both by their lines."""
    sources, found = [reading.source], list(reading.problems)

    def note(check: Callable[[], Result]) -> Result | None:
        try:
            return check()
        except ConfigError as error:
            found.extend(error.problems)
            return None

    sections = {name: note(partial(resolve, kind, name, sources)) for name, kind in SECTIONS.items()}
    entries = [note(partial(resolve, SECTIONS["drafter"], "drafter", sources, entry)) for entry in reading.source.drafters or ()]
    if up := sections["up"]:
        note(partial(resolve_drafters, up.config.drafters, up.origins["drafters"], sources))
    if not found:
        options = resolve_stack(sources)
        note(lambda: check_ports(options, sections))
        note(lambda: describe_capacity(options, sections))
    models = [(sections["verifier"], "model")]
    models += [(each, f"{SPECULATIVE}.model") for each in entries or [sections["drafter"]]]
    missing = [problem for each, key in models if each and (problem := _missing_model(each, key))]
    return ConfigError(found).problems if found else (), tuple(dict.fromkeys(missing))


def _missing_model(resolved: Resolved[Any], key: str) -> Problem | None:
    config = resolved.config
    model = config.model if key == "model" else config.speculative_config.model or ""
    try:
        check_model(model)
    except InvalidArgumentError as error:
        return Problem(resolved.origins[key], str(error))
    return None
