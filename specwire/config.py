"""Configuration of each service: frozen dataclasses, built once in `main` from flags; every field is a flag."""

import argparse
import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from specwire.speculative_config import SpeculativeConfig

Config = TypeVar("Config")

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_PORT = 50050


def option(default: Any, text: str) -> Any:
    """A field that is also a command-line flag, with its help text."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """The verifier's section."""

    listen: tuple[str, ...] = option(("127.0.0.1:50052",), "addresses to serve on: host:port or unix:path")
    model: str = option(DEFAULT_MODEL, "target model: a Hugging Face folder, a GGUF file or a hub id")
    load_format: str = option("auto", "auto, or dummy for seeded random weights of the model's shape")
    dtype: str = option("auto", "auto (bfloat16), float32 or bfloat16")
    device: str = option("cpu", "cpu or cuda")
    num_threads: int = option(0, "CPU threads of the model; 0 = all cores")
    max_model_len: int = option(0, "longest sequence in tokens; 0 = the model's context")
    max_num_seqs: int = option(16, "most sequences open at once")
    max_num_batched_tokens: int = option(512, "most tokens in one round")
    kv_cache_memory: int = option(1 << 30, "bytes for the paged KV cache")
    num_kv_blocks: int = option(0, "KV blocks; 0 = as many as kv_cache_memory holds")
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt prefixes")
    max_outstanding_rounds: int = option(2, "rounds that may be in flight (W)")
    max_message_mb: int = option(64, "largest gRPC message in MiB")
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; see the README's table")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The drafter's section; method and draft model are in speculative_config."""

    listen: tuple[str, ...] = option(("127.0.0.1:50051",), "addresses to serve on: host:port or unix:path")
    load_format: str = option("auto", "auto, or dummy for seeded random weights of the draft model's shape")
    dtype: str = option("auto", "draft model: auto (bfloat16), float32 or bfloat16")
    device: str = option("cpu", "cpu or cuda")
    num_threads: int = option(0, "CPU threads of the draft model; 0 = all cores")
    max_num_seqs: int = option(64, "most sequences open at once, over all lanes")
    prefill_chunk: int = option(256, "most prompt tokens the draft model computes between two rounds")
    kv_cache_memory: int = option(1 << 30, "bytes for the draft model's paged KV cache")
    max_message_mb: int = option(64, "largest gRPC message in MiB")
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; see the README's table")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator's section."""

    listen: tuple[str, ...] = option((f"127.0.0.1:{DEFAULT_PORT}",), "addresses to serve on: host:port or unix:path")
    verifiers: tuple[str, ...] = option((), "verifier addresses, one lane each")
    drafters: tuple[str, ...] = option((), "drafter addresses; none = plain decoding")
    coordinator_id: str = option("coordinator", "name under which this coordinator holds its verifiers")
    max_num_seqs: int = option(0, "most running sequences a lane; 0 = the verifier's limit")
    max_num_batched_tokens: int = option(0, "most tokens a round; 0 = the verifier's limit")
    max_queue: int = option(1024, "most waiting requests before new ones are refused")
    max_stream_backlog: int = option(1024, "most undelivered tokens of a stream before the sequence waits for its client")
    max_outstanding_rounds: int = option(2, "rounds in flight a lane (W)")
    min_draft_wait_ms: float = option(5.0, "least time that a step waits for a drafter; the wait is max(this, 3 x predicted)")
    verifier_wait_s: float = option(60.0, "how long running requests wait for a lost verifier before they fail")
    max_message_mb: int = option(64, "largest gRPC message in MiB")
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; see the README's table")


def flags(config: object) -> list[str]:
    """The command-line flags that rebuild this configuration: every field that differs from its default."""
    arguments: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value != field.default:
            text = value.to_json() if isinstance(value, SpeculativeConfig) else ",".join(value) if isinstance(value, tuple) else str(value).lower()
            arguments += [f"--{field.name.replace('_', '-')}", str(value) if isinstance(value, str) else text]
    return arguments


def parse_flags(kind: type[Config], program: str, arguments: list[str]) -> Config:
    """Builds a service's configuration from its flags; a wrong flag ends the process with status 2 and a message."""
    parser = argparse.ArgumentParser(prog=program, description=kind.__doc__, allow_abbrev=False)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = "" if isinstance(field.default, SpeculativeConfig) else f" (default {field.default})"
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=_parser(hints[field.name]), default=field.default, help=f"{field.metadata['help']}{default}")
    return kind(**vars(parser.parse_args(arguments)))


def _parser(hint: Any) -> Any:
    if hint is bool:
        return _parse_bool
    if hint is SpeculativeConfig:
        return _parse_speculative
    if typing.get_origin(hint) in (tuple, types.GenericAlias):
        return lambda text: tuple(part.strip() for part in text.split(",") if part.strip())
    return hint


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _parse_speculative(text: str) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
