"""From the arguments of LLM to the services that they ask for: what `specwire up` takes, under the same names."""

import difflib
import json
import numbers
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from specwire.config_file import read_config_file, read_override
from specwire.config_layers import Layer, Setting, Source
from specwire.errors import InvalidArgumentError
from specwire.speculative_config import read_keys
from specwire.stack.checks import check_models
from specwire.stack.plan import StackOptions
from specwire.stack.resolve import resolve_stack

_MODELS = ("load_format", "skip_tokenizer", "dtype", "weights", "device", "num_threads", "kv_cache_memory")
"""Of verifiers and drafters."""
_VERIFIER = (
    "model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", *_MODELS,
    # Not built: known here so that whoever asks for them is told what to do instead.
    "tensor_parallel_size", "kv_cache_dtype", "enable_lora",
)  # fmt: skip
_UP = ("verifiers", "drafters", "startup_timeout_s")
_KNOWN = (*_VERIFIER, *_UP)
_KINDS: dict[type, tuple[type, str]] = {
    int: (numbers.Integral, "an integer"), float: (numbers.Real, "a number"), bool: (bool, "True or False"), str: (str, "text"),
}  # fmt: skip
"""What a flag may be, by its own type, and what that is called."""


class StackFlags(TypedDict, total=False):
    """Arguments of LLM beside the model: each is the flag of `specwire up` and the key of specwire.yaml of that name."""

    load_format: str
    skip_tokenizer: bool
    dtype: str
    weights: str
    device: str
    num_threads: int
    kv_cache_memory: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    verifiers: int
    drafters: int
    startup_timeout_s: float


def make_options(
    model: str | os.PathLike[str] | None,
    speculative_config: Mapping[str, Any] | None,
    config: str | os.PathLike[str] | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any],
) -> StackOptions:
    """What these arguments ask for; they go before the overrides, and these before the file. A flag that is None is one that was left out.

    Raises:
        InvalidArgumentError: an unknown argument, with the nearest known one; a value, the file or the model can't be used.
    """
    for name in flags:
        if name not in _KNOWN:
            nearest = difflib.get_close_matches(name, _KNOWN, 1, cutoff=0.6)
            remedy = f"did you mean {nearest[0]}?" if nearest else "docs/offline.md lists what there is, and `overrides` sets any key of the file"
            raise InvalidArgumentError(f"LLM has no argument {name}; {remedy}")
    given = {name: _check_flag(name, value) for name, value in flags.items() if value is not None}
    if model is not None:
        given["model"] = _check_path("model", model, "a folder, a GGUF file or a hub id")
    speculative = {} if speculative_config is None else _read_speculative(speculative_config)
    if isinstance(overrides, str) or not isinstance(overrides, Sequence) or not all(isinstance(each, str) for each in overrides):
        raise InvalidArgumentError(
            f"overrides is {reprlib.repr(overrides)}, but must be a list of texts; give one such as ['verifier.max_num_seqs=8']"
        )
    source = Source(
        {"verifier": _layer(given, _VERIFIER), "drafter": _layer(given, _MODELS), "up": _layer(given, _UP)},
        {key: Setting(value, "speculative_config", f"speculative_config {key}") for key, value in speculative.items()},
    )
    file = [] if config is None else [read_config_file(Path(_check_path("config", config, "a specwire.yaml")))]
    options = resolve_stack([*file, *map(read_override, overrides), source])
    check_models(options)
    return options


def _check_flag(name: str, value: Any) -> Any:
    kind = get_type_hints(StackFlags).get(name)
    if kind is None:
        return value
    taken, words = _KINDS[kind]
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgumentError(f"{name} is {reprlib.repr(value)}, but must be {words}; give one, or leave it out")
    return kind(value)  # numpy's numbers are none of Python's


def _check_path(name: str, value: object, what: str) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InvalidArgumentError(f"{name} is {reprlib.repr(value)}, but must be the name of {what}; give one, or leave it out")
    return str(value)


def _read_speculative(config: Any) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        text = f"speculative_config is {reprlib.repr(config)}, but must be a mapping"
        raise InvalidArgumentError(f"{text}; give one such as {{'method': 'ngram', 'num_speculative_tokens': 5}}")
    try:
        text = json.dumps(dict(config), default=os.fspath)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"speculative_config can't be read ({error}); its values are text, numbers, lists and mappings") from None
    return read_keys(text)


def _layer(given: Mapping[str, Any], names: Sequence[str]) -> Layer:
    return Layer({name: Setting(given[name], name, name) for name in names if name in given})
