"""Reads a YAML document as a configuration, with the line of every value; what it may hold are the fields of specwire.config."""

import dataclasses
import difflib
import typing
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from specwire.config import MAX_REPLICAS, ClientConfig, CoordinatorConfig, DrafterConfig, HttpConfig, UpConfig, VerifierConfig
from specwire.config_layers import SPECULATIVE, ConfigError, Layer, ListedDrafter, Problem, Setting, Source
from specwire.errors import InvalidArgumentError
from specwire.speculative_acceptance import MEAN_RATE
from specwire.speculative_config import SpeculativeConfig
from specwire.speculative_keys import FOREIGN_KEYS

SECTIONS: Mapping[str, type] = {
    "verifier": VerifierConfig,
    "drafter": DrafterConfig,
    "coordinator": CoordinatorConfig,
    "http": HttpConfig,
    "up": UpConfig,
    "client": ClientConfig,
}
_TOP = (SPECULATIVE, *SECTIONS, "drafters")
_SPECULATIVE_KEYS = (*(field.name for field in dataclasses.fields(SpeculativeConfig)), MEAN_RATE)
DRAFTING_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "suffix_decoding_corpus_tokens",
    "draft_sample_method",
    "draft_sharpness",
    "max_model_len",
    "use_heterogeneous_vocab",
    "parallel_drafting",
    "dspark_draft_topk",
)
"""What a drafter itself needs of speculation; the rest is the same for all services."""
_NULL = "tag:yaml.org,2002:null"
_MAX_SHOWN = 60
_MAX_NODES = 20_000  # a thousand drafters with all of their keys


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be read of a file, and what is wrong with the rest: unknown or repeated keys, values of a wrong type."""

    source: Source
    problems: tuple[Problem, ...]


class ConfigReader:
    """Walks the nodes of one YAML document and collects what is wrong with it.

    Args:
        name: what origins begin with.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._problems: list[Problem] = []

    def read(self, path: Iterable[str] = ()) -> Reading:
        """The whole document, which stands under these keys."""
        try:
            self._loader = yaml.SafeLoader(self._text)
            node = self._loader.get_single_node()
        except yaml.YAMLError as error:
            raise ConfigError([self._syntax_problem(error)]) from error
        except RecursionError as error:
            raise ConfigError(
                [Problem(self._name, "has lists or mappings too deep in each other; a configuration needs four levels at most")]
            ) from error
        if _num_nodes(node, _MAX_NODES) > _MAX_NODES:
            text = f"has more than {_MAX_NODES} keys and values, counting what an alias stands for each time; write fewer"
            raise ConfigError([Problem(self._name, text)])
        mark = node.start_mark if node else self._loader.get_mark()
        for key in reversed(list(path)):
            key_node = yaml.ScalarNode("tag:yaml.org,2002:str", key, mark)
            node = yaml.MappingNode("tag:yaml.org,2002:map", [(key_node, node or yaml.ScalarNode(_NULL, "", mark))], mark)
        source = self._source(node)
        return Reading(source, tuple(self._problems))

    def _source(self, root: yaml.Node | None) -> Source:
        shared: Mapping[str, Setting] = {}
        drafters: tuple[ListedDrafter, ...] | None = None
        sections: dict[str, Layer] = {}
        for key, node in self._entries(root, "", _TOP).items():
            if key == SPECULATIVE:
                shared = self._speculative(node, key)
            elif key == "drafters":
                drafters = self._drafters(node)
            else:
                sections[key] = self._section(node, key, SECTIONS[key])
        return Source(sections, shared, drafters)

    def _section(self, node: yaml.Node, name: str, kind: type) -> Layer:
        hints = typing.get_type_hints(kind)
        entries = self._entries(node, name, [field.name for field in dataclasses.fields(kind)])
        speculative = self._speculative(entries.pop(SPECULATIVE), f"{name}.{SPECULATIVE}") if SPECULATIVE in entries else {}
        return self._layer(entries, name, hints, speculative)

    def _layer(self, entries: Mapping[str, yaml.Node], name: str, hints: Mapping[str, Any], speculative: Mapping[str, Setting]) -> Layer:
        fields = self._settings(entries, name, hints)
        return Layer(fields, speculative, frozenset(entries) - frozenset(fields))

    def _speculative(self, node: yaml.Node, name: str) -> dict[str, Setting]:
        """Values as they are: SpeculativeConfig checks their types."""
        return self._settings(self._entries(node, name, _SPECULATIVE_KEYS, FOREIGN_KEYS), name, {})

    def _drafters(self, node: yaml.Node) -> tuple[ListedDrafter, ...]:
        if not isinstance(node, yaml.SequenceNode):
            self._report(node, "drafters must be a list with an entry for each kind of drafter, such as [{method: ngram, count: 2}]")
            return ()
        hints = {key: hint for key, hint in typing.get_type_hints(DrafterConfig).items() if key not in (SPECULATIVE, "listen")}
        listed = []
        for index, entry in enumerate(node.value):
            name = f"drafters[{index}]"
            entries = self._entries(entry, name, [*hints, "count", *DRAFTING_KEYS])
            speculative = self._settings({key: entries.pop(key) for key in DRAFTING_KEYS if key in entries}, name, {})
            count = self._count(entries.pop("count", None), name)
            listed.append(ListedDrafter(self._layer(entries, name, hints, speculative), count, self._origin(entry)))
        return tuple(listed)

    def _count(self, node: yaml.Node | None, name: str) -> int:
        """How many drafters an entry stands for; 1 where that is wrong."""
        count = self._settings({"count": node} if node else {}, name, {"count": int}).get("count")
        if count is None:
            return 1
        if not 1 <= count.value <= MAX_REPLICAS:
            self._problems.append(Problem(count.origin, f"{count.name} is {count.value}, but must be a number from 1 to {MAX_REPLICAS}"))
            return 1
        return int(count.value)

    def _entries(self, node: yaml.Node | None, name: str, known: Iterable[str], foreign: Container[str] = ()) -> dict[str, yaml.Node]:
        """The values of a mapping by key; a missing value stands for an empty mapping. Foreign keys are for others to refuse."""
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL):
            return {}
        if not isinstance(node, yaml.MappingNode):
            self._report(node, f"{name or 'the file'} must be a mapping of keys to values, one `key: value` a line")
            return {}
        entries: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        known = list(known)
        for key_node, value_node in node.value:
            key = str(key_node.value).replace("-", "_") if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            shown = key if key.isidentifier() else repr(key)[:_MAX_SHOWN]
            full = f"{name}.{shown}" if name else shown
            if key == "<<":
                self._report(key_node, f"{full} is a merge key, which is not read here; write the keys out, or name a whole value by an alias")
            elif key not in known and key not in foreign:
                near = difflib.get_close_matches(key, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
                is_speculative = key in _SPECULATIVE_KEYS and SPECULATIVE in known
                self._report(key_node, f"{full} is an unknown key; {f'it is one of {SPECULATIVE}: put it there' if is_speculative else remedy}")
            elif key in entries:
                self._report(key_node, f"{full} stands here for the second time, first in line {lines[key]}; remove one")
            else:
                entries[key], lines[key] = value_node, key_node.start_mark.line + 1
        return entries

    def _settings(self, entries: Mapping[str, yaml.Node], name: str, hints: Mapping[str, Any]) -> dict[str, Setting]:
        """Values by key, of the types that the hints say."""
        settings = {}
        for key, node in entries.items():
            full = f"{name}.{key}"
            try:
                value = self._loader.construct_object(node, deep=True)
                if key in hints:
                    value = _typed(value, hints[key], full)
            except InvalidArgumentError as error:
                self._report(node, str(error))
            except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:  # explicit tags on what they do not fit
                self._report(node, f"{full} can't be read ({type(error).__name__}); write a plain number, text or list")
            else:
                settings[key] = Setting(value, self._origin(node), full)
        return settings

    def _report(self, node: yaml.Node, message: str) -> None:
        self._problems.append(Problem(self._origin(node), message))

    def _origin(self, node: yaml.Node) -> str:
        return self._name if self._name.startswith("--") else f"{self._name}:{node.start_mark.line + 1}"

    def _syntax_problem(self, error: yaml.YAMLError) -> Problem:
        mark = getattr(error, "problem_mark", None)
        text = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))) or " ".join(str(error).split())
        return Problem(f"{self._name}:{mark.line + 1}" if mark else self._name, f"is no YAML: {text}; check quotes, colons and indentation")


def _num_nodes(root: yaml.Node | None, limit: int) -> int:
    """Nodes of a document, those of an alias each time that it stands there; a number above the limit as soon as there are more."""
    waiting, num_nodes = [root] if root is not None else [], 0
    while waiting and num_nodes <= limit:
        node = waiting.pop()
        num_nodes += 1
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
    return num_nodes


def _typed(value: Any, hint: Any, name: str) -> Any:
    """The value as the field takes it. Raises InvalidArgumentError if YAML read something else."""
    if typing.get_origin(hint) is tuple:
        # As the flag has it, or a list.
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return tuple(part for part in parts if part)
        wanted = "a list of texts such as [127.0.0.1:50052]"
    elif hint is bool:
        if isinstance(value, bool):
            return value
        wanted = "true or false, without quotes"
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        wanted = "an integer, without quotes or decimals"
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        wanted = "a number, without quotes"
    else:
        assert hint is str, f"no rule for {hint} of {name}"
        if isinstance(value, str):
            return value
        wanted = "text; put it in quotes"
    shown = "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    raise InvalidArgumentError(f"{name} is {shown[:_MAX_SHOWN]}, but must be {wanted}")
