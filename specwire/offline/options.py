"""From the arguments of LLM to the services that they ask for: what `specwire up` takes, under the same names."""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

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
    model: str | None, speculative_config: Mapping[str, Any] | None, config: str | None, overrides: Sequence[str], flags: Mapping[str, Any]
) -> StackOptions:
    """What these arguments ask for; they go before the overrides, and these before the file.

    Raises:
        InvalidArgumentError: an unknown argument, with the nearest known one; a value, the file or the model can't be used.
    """
    for name in flags:
        if name not in _KNOWN:
            nearest = difflib.get_close_matches(name, _KNOWN, 1, cutoff=0.6)
            remedy = f"did you mean {nearest[0]}?" if nearest else "docs/offline.md lists what there is, and `overrides` sets any key of the file"
            raise InvalidArgumentError(f"LLM has no argument {name}; {remedy}")
    given = flags if model is None else {"model": str(model), **flags}
    speculative = {} if speculative_config is None else read_keys(json.dumps(dict(speculative_config)))
    source = Source(
        {"verifier": _layer(given, _VERIFIER), "drafter": _layer(given, _MODELS), "up": _layer(given, _UP)},
        {key: Setting(value, "speculative_config", f"speculative_config {key}") for key, value in speculative.items()},
    )
    file = [] if config is None else [read_config_file(Path(config))]
    options = resolve_stack([*file, *map(read_override, overrides), source])
    check_models(options)
    return options


def _layer(given: Mapping[str, Any], names: Sequence[str]) -> Layer:
    return Layer({name: Setting(given[name], name, name) for name in names if name in given})
