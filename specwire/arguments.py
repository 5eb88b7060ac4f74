"""A service's command line: every field of its configuration as a flag, and `--config FILE` for what the flags do not say."""

import argparse
import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specwire.config import PROGRAM_VARIABLE, Config
from specwire.config_fields import flag_name, format_value
from specwire.config_file import find_config_file, read_config_file
from specwire.config_layers import SPECULATIVE, Layer, Setting, Settings, Source, resolve
from specwire.errors import SpecwireError
from specwire.speculative_config import SpeculativeConfig, read_keys

_GROUPS = {
    "TLS and API keys": r"tls_|coordinator_tls_|api_keys",
    "metrics and traces": r"trace_|metrics_listen|vllm_metrics",
    "speculation": r"speculative_config|adaptive_|schedule_|half_batches|canary_|calibration_file|min_draft_wait|target_model|prefill_chunk",
    "features for draft heads": r"features|share_features|feature_address|read_shared_features",
    "sizes and limits": r"max_|kv_cache|num_kv_blocks|gpu_memory|enable_prefix_caching|client_stall|keep_alive|grace_s|verifier_\w+_s$",
    "model and device": (
        r"model|load_format|skip_tokenizer|dtype|weights|device|num_threads|use_cuda_graphs|profile_context_len|\w+_parallel_size|enable_lora"
    ),
}
"""Headings of the help, and the beginnings of the fields' names that belong there; the first that fits counts."""


def parse_flags(kind: type[Config], program: str, arguments: Sequence[str]) -> Config:
    """Builds a service's configuration: its section of the file that --config or SPECWIRE_CONFIG names, if any, and the flags over it.

    A wrong flag or file ends the process with status 2 and one line on stderr.

    Args:
        program: its name in messages, unless `specwire verifier` or its like has said what the user typed.
    """
    # Taken out: what this process starts is called otherwise.
    parser = _Parser(prog=os.environ.pop(PROGRAM_VARIABLE, program), description=kind.__doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="specwire.yaml to read (default: what SPECWIRE_CONFIG names); empty = none")
    hints = typing.get_type_hints(kind)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = "" if field.name == SPECULATIVE else f" (default {format_value(field.default) or 'none'})"
        text = f"{field.metadata['help']}{default}"
        switch: dict[str, Any] = {"nargs": "?", "const": True} if hints[field.name] is bool else {}
        if typing.get_origin(hints[field.name]) is tuple:
            switch = {"action": "extend"}  # several in one flag, or a flag for each
        group = _group_of(field.name)
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(flag_name(field.name), type=_parser(hints[field.name]), default=argparse.SUPPRESS, help=text, **switch)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        nearest = difflib.get_close_matches(unknown[0].partition("=")[0], map(flag_name, hints), 1)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {nearest[0]}?' if nearest else ''}")
    given = vars(known)
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    section = kind.__name__.removesuffix("Config").lower()
    try:
        return resolve(kind, section, [*_file_sources(given.pop("config")), Source({section: flags_layer(given)})]).config
    except SpecwireError as error:
        parser.error(str(error))


def _group_of(name: str) -> str:
    """Under which heading of the help a field's flag stands."""
    return next((title for title, pattern in _GROUPS.items() if re.match(pattern, name)), "service")


def flags_layer(given: Mapping[str, Any]) -> Layer:
    """What flags say of a service: values by field; speculative_config as its keys."""
    fields = {name: Setting(value, flag_name(name), flag_name(name)) for name, value in given.items() if name != SPECULATIVE}
    return Layer(fields, speculative_flag(given.get(SPECULATIVE, {})))


def speculative_flag(keys: Mapping[str, Any]) -> Settings:
    """What --speculative-config says."""
    flag = flag_name(SPECULATIVE)
    return {key: Setting(value, flag, f"{flag} {key}") for key, value in keys.items()}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes a value for the end of the flags if it is two dashes, even behind an equals sign.
        return self._get_value(action, "--") if arg_strings == ["--"] and action.option_strings else super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the flags)\n")


def _file_sources(named: str | None) -> list[Source]:
    path = find_config_file(named, in_folder=False)
    return [read_config_file(path)] if path else []


def _parser(hint: Any) -> Any:
    if hint is bool:
        return _parse_bool
    if hint is SpeculativeConfig:
        return _parse_speculative
    if typing.get_origin(hint) is tuple:
        return _parse_list
    return hint


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_speculative(text: str) -> dict[str, Any]:
    try:
        return read_keys(text)
    except SpecwireError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
