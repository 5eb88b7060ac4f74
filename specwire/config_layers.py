"""Where each value of a configuration comes from, and which one takes effect: default < file < environment < flag."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from specwire.config import Config
from specwire.config_fields import check_field, flag_name
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.speculative_acceptance import MEAN_RATE
from specwire.speculative_config import SpeculativeConfig
from specwire.speculative_method import has_model

SPECULATIVE = "speculative_config"
DEFAULT = "default"
_RATES = frozenset({"synthetic_acceptance_rates", "synthetic_acceptance_length", MEAN_RATE})
# Keys that are checked against each other: what is wrong with one is not reported again of the others.
_GROUPS = (
    frozenset({"method", "model"}),
    frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
    frozenset({"num_speculative_tokens", "rejection_sample_method"}) | _RATES,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that somebody gave.

    Args:
        origin: `specwire.yaml:7`, `environment SPECWIRE_ADDRESS`, `--max-num-seqs`.
        name: what they call it: `verifier.max_num_seqs`, or the flag again.
    """

    value: Any
    origin: str
    name: str


Settings = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source says of one service: its fields, and the keys of its speculative_config apart.

    Args:
        unreadable: fields that it gives, but in a way that nothing can be made of.
    """

    fields: Settings = field(default_factory=dict)
    speculative: Settings = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ListedDrafter:
    """An entry of `drafters`: so many drafters with these values over those of the section `drafter`; and where it stands."""

    layer: Layer
    count: int
    origin: str = "drafters"


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that one file, or the flags of one command, say.

    Args:
        sections: by name: verifier, drafter, coordinator, up, client.
        shared: the speculative_config of all services; a section's own keys go before it.
        drafters: the entries of `drafters`; None if there is no such list.
    """

    sections: Mapping[str, Layer] = field(default_factory=dict)
    shared: Settings = field(default_factory=dict)
    drafters: tuple[ListedDrafter, ...] | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one value, and where it stands."""

    origin: str
    message: str

    @property
    def line(self) -> int:
        """In the file; 0 if it is not there."""
        number = self.origin.rpartition(":")[2]
        return int(number) if number.isdecimal() else 0

    def __str__(self) -> str:
        return self.message if self.message.startswith(self.origin) else f"{self.origin}: {self.message}"


class ConfigError(InvalidArgumentError):
    """Values that no service can be started with; the message is the first problem in one line, `problems` has all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(dict.fromkeys(problems), key=lambda problem: problem.line))
        more = len(self.problems) - 1
        file = self.problems[0].origin.rpartition(":")[0] if self.problems[0].line else ""
        check = f"specwire config check {file}".rstrip()
        super().__init__(f"{self.problems[0]}{f' (and {more} more; `{check}` lists all)' if more else ''}")


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Config]):
    """A configuration in effect. `origins` has every key; those of speculation as `speculative_config.method`."""

    config: Config
    origins: Mapping[str, str]


def resolve(kind: type[Config], section: str, sources: Sequence[Source], listed: ListedDrafter | None = None) -> Resolved[Config]:
    """The configuration of a section by these sources, the strongest last.

    Args:
        listed: the entry of `drafters` that is meant, where the section is `drafter`.

    Raises:
        ConfigError: some values are wrong.
    """
    layers = list(_layers(section, sources, listed))
    settings: dict[str, Setting] = {}
    for layer in layers:
        settings |= layer.fields
    problems: list[Problem] = []
    bad = {key for layer in layers for key in layer.unreadable}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        if each.name == SPECULATIVE:
            values[SPECULATIVE] = _resolve_speculative([layer.speculative for layer in layers], origins, problems)
            continue
        setting = settings.get(each.name)
        origins[each.name] = setting.origin if setting else DEFAULT
        if setting:
            try:
                check_field(each, setting.value, setting.name)
            except SpecwireError as error:
                problems.append(Problem(setting.origin, str(error)))
                bad.add(each.name)
            else:
                values[each.name] = setting.value
    try:
        config = kind(**values)
    except SpecwireError as error:  # values that do not go together; what is wrong by itself is not reported again
        if not any(flag_name(name) in _flags(str(error)) for name in bad):
            problems.append(locate(section, str(error), settings))
        config = kind()  # nobody works with it: there are problems, here or known to the reader of the file
    if problems:
        raise ConfigError(problems)
    return Resolved(config, origins)


def locate(section: str, message: str, settings: Settings) -> Problem:
    """A problem of values that do not go together, at the first one that the message names as a flag, in the words of who gave it."""
    flags = _flags(message)
    named = [settings[key] for flag in flags for key in settings if flag_name(key) == flag]
    if not named or named[0].name.startswith("--"):
        return Problem(named[0].origin if named else section, message)
    holder = named[0].name.rpartition(".")[0]
    for flag in flags:
        message = re.sub(rf"{flag}(?![\w-])", f"{holder}.{flag[2:].replace('-', '_')}", message)
    return Problem(named[0].origin, message)


def merge_speculative(sources: Iterable[Settings]) -> dict[str, Setting]:
    """Later sources over earlier ones, key by key. What no longer applies goes: the model of another method, rates given in another way."""
    merged: dict[str, Setting] = {}
    for source in sources:
        replaced: set[str] = set()
        if "model" in source:
            replaced.add("method")
        elif "method" in source and not has_model(source["method"].value):
            replaced.add("model")
        if not _RATES.isdisjoint(source) or ("rejection_sample_method" in source and source["rejection_sample_method"].value != "synthetic"):
            replaced |= _RATES
        merged = {key: setting for key, setting in merged.items() if key not in replaced} | dict(source)
    return merged


def _layers(section: str, sources: Sequence[Source], listed: ListedDrafter | None) -> Iterator[Layer]:
    for source in sources:
        yield Layer(speculative=source.shared)
        yield source.sections.get(section, Layer())
        if listed is not None and source.drafters is not None and listed in source.drafters:
            yield listed.layer


def _resolve_speculative(sources: Iterable[Settings], origins: dict[str, str], problems: list[Problem]) -> SpeculativeConfig:
    merged = merge_speculative(sources)
    config = _build_speculative(merged, problems)
    for each in dataclasses.fields(SpeculativeConfig):
        origins[f"{SPECULATIVE}.{each.name}"] = _speculative_origin(each.name, getattr(config, each.name) != each.default, merged)
    return config


def _build_speculative(settings: Settings, problems: list[Problem]) -> SpeculativeConfig:
    """The object of all keys that can be taken; what is wrong with others is added to the problems."""
    while True:
        try:
            return SpeculativeConfig.from_dict({key: setting.value for key, setting in settings.items()})
        except SpecwireError as error:
            message = str(error)
            # It names the key that is wrong first; others are what it was compared with.
            culprit = min((key for key in settings if _position(key, message) >= 0), key=lambda key: _position(key, message), default=None)
            assert culprit is not None, f"{message!r} names none of {sorted(settings)}"
            name = settings[culprit].name
            text = f"{name}{message.removeprefix(culprit)}" if message.startswith(culprit) else f"{name}: {message}"
            problems.append(Problem(settings[culprit].origin, text))
            group = next((group for group in _GROUPS if culprit in group), frozenset({culprit}))
            settings = {key: setting for key, setting in settings.items() if key not in group}


def _speculative_origin(key: str, is_changed: bool, merged: Settings) -> str:
    """A value may follow from another key: a model makes the method draft_model, one lookup bound sets both."""
    if key in merged:
        return merged[key].origin
    causes = [merged[other].origin for group in _GROUPS if key in group for other in sorted(group) if other in merged]
    return causes[0] if is_changed and causes else DEFAULT


def _flags(message: str) -> list[str]:
    """The flags that a message names."""
    return re.findall(r"--[a-z][a-z-]*", message)


def _position(key: str, message: str) -> int:
    found = re.search(rf"\b{key}\b", message)
    return found.start() if found else -1
