"""`specwire config`: the problems of a file, and the configuration that it comes to."""

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from specwire.cli.connection import ConnectionOptions, make_client
from specwire.cli.report import drafter_clipping
from specwire.cli.sources import read_sources
from specwire.config import ADDRESS_VARIABLE, DEFAULT_FILE, FILE_VARIABLE
from specwire.config_fields import flag_name, format_value
from specwire.config_file import find_config_file
from specwire.config_layers import DEFAULT, SPECULATIVE, ConfigError, Layer, Problem, Resolved, Setting, Source, resolve
from specwire.config_reader import SECTIONS
from specwire.console import make_console
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription, describe_engine
from specwire.policy.effective import effective_speculation
from specwire.policy.schedule import describe_gaps
from specwire.speculative_config import SpeculativeConfig
from specwire.stack.checks import check_addresses
from specwire.stack.plan import Stack, StackOptions, plan_stack
from specwire.stack.resolve import resolve_stack

_WIDTH = 140  # columns of tables where there is no terminal
_FOLDER = "SOCKETS"
_TITLES = {"up": "up, for specwire up only", "client": "client"}


@dataclass(frozen=True, slots=True)
class Effective:
    """What some sources come to.

    Args:
        sections: each service started alone, by section; and the sections `up` and `client`.
        drafters: of each entry of `drafters`: how many, and what they are.
        stack: what `specwire up` starts.
        engine: capacities and schedule, as far as they follow from the configuration.
    """

    sections: Mapping[str, Resolved[Any]]
    drafters: tuple[tuple[int, Resolved[Any]], ...]
    stack: Stack
    engine: EngineDescription

    @property
    def clipped(self) -> list[str]:
        """What does not take effect as it was written, and why."""
        coordinator = self.stack.coordinator.speculative_config
        reasons = list(self.engine.reasons)
        if self.engine.num_speculative_tokens:
            reasons += describe_gaps(coordinator.num_speculative_tokens_per_batch_size, self.engine.max_num_seqs)
        unread = [line for drafter in self.stack.drafters for line in drafter.speculative_config.unread]
        return reasons + drafter_clipping(self.stack, self.engine) + list(dict.fromkeys(unread))


def find_file(named: str | None) -> Path:
    """The file to look at. Raises InvalidArgumentError if there is none."""
    path = find_config_file(named, in_folder=True)
    if path is None:
        raise InvalidArgumentError(f"there is no {DEFAULT_FILE} here and {FILE_VARIABLE} names no file; name one, or write one")
    return path


def read_effective(named: str | None, overrides: Sequence[str]) -> Effective:
    """What the file, the environment and `--set` come to. Raises ConfigError or InvalidArgumentError if that is nothing."""
    sources = read_sources(named, [])
    return resolve_all([*sources, *environment(), *read_sources("", overrides)])


def run_show(effective: Effective, running: ConnectionOptions | None, *, as_json: bool) -> None:
    """Prints it, and what a running coordinator says that it clipped. Raises SpecwireError if that does not answer."""
    clipped: tuple[str, ...] | None = None
    if running is not None:
        with make_client(running) as client:
            clipped = client.get_status().clipped
    if as_json:
        more = {} if clipped is None else {"clipped_by_coordinator": clipped}
        typer.echo(json.dumps(as_object(effective) | more, indent=2))
        return
    console = make_console(_WIDTH)
    print_effective(console, effective)
    for line in clipped or ():
        console.print(f"clipped by the running coordinator: {line}", style="yellow", markup=False, soft_wrap=True)


def environment() -> list[Source]:
    """What the environment says: only where the coordinator is."""
    address = os.environ.get(ADDRESS_VARIABLE)
    setting = Setting(address, f"environment {ADDRESS_VARIABLE}", ADDRESS_VARIABLE)
    return [Source({"client": Layer({"address": setting})})] if address else []


def resolve_all(sources: Sequence[Source]) -> Effective:
    """Everything that the sources come to.

    Raises:
        ConfigError: with the problems of all sections.
    """
    problems: list[Problem] = []
    sections: dict[str, Resolved[Any]] = {}
    drafters: list[tuple[int, Resolved[Any]]] = []
    for name, kind in SECTIONS.items():
        try:
            sections[name] = resolve(kind, name, sources)
        except ConfigError as error:
            problems += error.problems
    for entry in next((source.drafters for source in reversed(sources) if source.drafters is not None), ()):
        try:
            drafters.append((entry.count, resolve(SECTIONS["drafter"], "drafter", sources, entry)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    options = resolve_stack(sources)
    check_ports(options, sections)
    return Effective(sections, tuple(drafters), plan_stack(options, Path(_FOLDER)), describe_capacity(options, sections))


def as_object(effective: Effective) -> dict[str, Any]:
    """As `--json` prints it."""
    return {
        "sections": {name: _settings_object(resolved) for name, resolved in effective.sections.items()},
        "drafters": [{"count": count, **_settings_object(resolved)} for count, resolved in effective.drafters],
        "up_starts": {spec.name: spec.arguments[1:] for group in effective.stack.groups() for spec in group},
        "schedule": effective.engine.schedule_ranges,
        "speculation": [
            dataclasses.asdict(setting)
            for setting in effective_speculation(effective.stack.coordinator, effective.engine, effective.sections["coordinator"].origins)
        ],
        "clipped": effective.clipped,
    }


def print_effective(console: Console, effective: Effective) -> None:
    """As tables."""
    tables = {name: _rows(resolved) for name, resolved in effective.sections.items()}
    if shared := _take_shared(tables):
        _print_table(console, f"{SPECULATIVE}, of verifier, drafter and coordinator", shared)
    for name, rows in tables.items():
        _print_table(console, _TITLES.get(name, f"{name}, started by itself"), rows)
    for index, (count, resolved) in enumerate(effective.drafters):
        common = _rows(effective.sections["drafter"])
        _print_table(console, f"drafters[{index}] ({count}), where they differ from drafter", [row for row in _rows(resolved) if row not in common])
    rows = [(spec.name, shlex.join(map(_shortened, spec.arguments[1:])), "") for group in effective.stack.groups() for spec in group]
    _print_table(console, f"specwire up starts these, with its sockets in a folder of its own, here {_FOLDER}", rows)
    rows = [(f"{start}" if start == end else f"{start}-{end}", str(value), "") for start, end, value in effective.engine.schedule_ranges]
    _print_table(console, "schedule: most drafts (K) by sequences that sample in a step", rows)
    for line in effective.clipped:
        console.print(f"clipped: {line}", style="yellow", markup=False, soft_wrap=True)


def check_ports(options: StackOptions, sections: Mapping[str, Resolved[Any] | None]) -> None:
    """Raises ConfigError, with the line of what was given, if `specwire up` would listen for both APIs at one address."""
    try:
        check_addresses(options)
    except InvalidArgumentError as error:
        keys = (("up", "http_port"), ("up", "port"), ("http", "listen"), ("coordinator", "listen"))
        origins = [resolved.origins[key] for section, key in keys if (resolved := sections[section])]
        raise ConfigError([Problem(next((origin for origin in origins if origin != DEFAULT), "up"), str(error))]) from error


def describe_capacity(options: StackOptions, sections: Mapping[str, Resolved[Any] | None]) -> EngineDescription:
    """What the coordinator would say if the verifiers can hold what they are configured for; the model's context is not known here.

    Raises:
        ConfigError: it would not take them, with the line of a key of these sections that has to do with it.
    """
    verifier = options.verifier
    description = ServiceDescription(
        verifier.model,
        "",
        0,
        max_model_len=verifier.max_model_len or 1,
        max_num_draft_tokens=verifier.speculative_config.num_speculative_tokens,
        max_num_seqs=verifier.max_num_seqs,
        max_num_batched_tokens=verifier.max_num_batched_tokens,
        max_message_bytes=verifier.max_message_mb << 20,
    )
    drafters = tuple(f"drafter:{index + 1}" for index in range(len(options.drafters)))
    try:
        return describe_engine(dataclasses.replace(options.coordinator, drafters=drafters), [description])
    except SpecwireError as error:
        origins = [resolved.origins for name in ("verifier", "coordinator") if (resolved := sections[name])]
        given = [origin for each in origins for key, origin in each.items() if origin != DEFAULT and re.search(rf"\b{key}\b", str(error))]
        raise ConfigError([Problem(given[0] if given else "coordinator", str(error))]) from error


def _settings(resolved: Resolved[Any]) -> list[tuple[str, Any, str]]:
    """(key, value, origin) of every key; those of speculation one by one."""
    settings = []
    for field in dataclasses.fields(resolved.config):
        value = getattr(resolved.config, field.name)
        if field.name != SPECULATIVE:
            settings.append((field.name, value, resolved.origins[field.name]))
            continue
        for each in dataclasses.fields(value):
            key = f"{SPECULATIVE}.{each.name}"
            settings.append((key, getattr(value, each.name), resolved.origins[key]))
    return settings


def _settings_object(resolved: Resolved[Any]) -> dict[str, Any]:
    return {key: {"value": value, "from": origin} for key, value, origin in _settings(resolved)}


def _rows(resolved: Resolved[Any]) -> list[tuple[str, str, str]]:
    return [(key, _shown(value), origin) for key, value, origin in _settings(resolved)]


def _take_shared(tables: dict[str, list[tuple[str, str, str]]]) -> list[tuple[str, str, str]]:
    """Takes the keys of speculation out of the services' tables where all have the same, and gives them without their prefix."""
    speculative = {name: [row for row in rows if row[0].startswith(f"{SPECULATIVE}.")] for name, rows in tables.items()}
    services = [name for name, rows in speculative.items() if rows]
    shared = speculative[services[0]]
    if any(speculative[name] != shared for name in services):
        return []
    for name in services:
        tables[name] = [row for row in tables[name] if row not in shared]
    return [(key.removeprefix(f"{SPECULATIVE}."), value, origin) for key, value, origin in shared]


def _shortened(argument: str) -> str:
    """An argument of a service; of speculation only what differs from its default."""
    flag, _, text = argument.partition("=")
    if flag != flag_name(SPECULATIVE):
        return argument
    config = SpeculativeConfig.from_json(text)
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default}
    return f"{flag}={json.dumps(given)}"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    is_plain = not isinstance(value, tuple) or all(isinstance(part, str) for part in value)
    return format_value(value) if is_plain else json.dumps(value)


def _print_table(console: Console, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, title_style="bold")
    for name in ("key", "value", "from"):
        table.add_column(name, overflow="fold")
    for key, value, origin in rows:
        table.add_row(key, value, origin, style="dim" if origin == "default" else "")
    console.print(table)
