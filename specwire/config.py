"""Configuration of each service: frozen dataclasses, built once in `main` from flags; every field is a flag."""

import argparse
import dataclasses
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.speculative_config import SpeculativeConfig

Config = TypeVar("Config")

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_PORT = 50050
_MAX_SOCKET_PATH_BYTES = 107
_MAX_NUMBER = 2**31 - 1  # counts are int32 in messages
_MAX_MESSAGE_MB = 2047  # gRPC holds the bytes in an int32
_MAX_BYTES = 2**63 - 1
_DTYPES = "auto|float32|bfloat16"
_DEVICES = r"cpu|cuda(:\d+)?"


def option(default: Any, text: str, low: float | None = None, pattern: str | None = None, high: float = _MAX_NUMBER) -> Any:
    """A field that is also a command-line flag: its help text, and its range (if it has a least value) or the regular expression that it must
    match."""
    return dataclasses.field(default=default, metadata={"help": text, "low": low, "high": high, "pattern": pattern})


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """The verifier's section."""

    listen: tuple[str, ...] = option(("127.0.0.1:50052",), "addresses to serve on: host:port or unix:path")
    model: str = option(DEFAULT_MODEL, "target model: a Hugging Face folder, a GGUF file or a hub id", pattern=".+")
    load_format: str = option("auto", "auto, or dummy for seeded random weights of the model's shape", pattern="auto|dummy")
    dtype: str = option("auto", "auto (bfloat16), float32 or bfloat16", pattern=_DTYPES)
    device: str = option("cpu", "cpu or cuda", pattern=_DEVICES)
    num_threads: int = option(0, "CPU threads of the model; 0 = all cores", low=0)
    max_model_len: int = option(0, "longest sequence in tokens; 0 = the model's context", low=0)
    max_num_seqs: int = option(16, "most sequences open at once", low=1)
    max_num_batched_tokens: int = option(512, "most tokens in one round", low=1)
    kv_cache_memory: int = option(1 << 30, "bytes for the paged KV cache", low=1, high=_MAX_BYTES)
    num_kv_blocks: int = option(0, "KV blocks; 0 = as many as kv_cache_memory holds", low=0)
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt prefixes")
    max_outstanding_rounds: int = option(2, "rounds that may be in flight (W)", low=1)
    max_message_mb: int = option(64, "largest gRPC message in MiB", low=1, high=_MAX_MESSAGE_MB)
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; see the README's table")

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_addresses("listen", self.listen, lowest_port=0)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The drafter's section; method and draft model are in speculative_config."""

    listen: tuple[str, ...] = option(("127.0.0.1:50051",), "addresses to serve on: host:port or unix:path")
    load_format: str = option("auto", "auto, or dummy for seeded random weights of the draft model's shape", pattern="auto|dummy")
    dtype: str = option("auto", "draft model: auto (bfloat16), float32 or bfloat16", pattern=_DTYPES)
    device: str = option("cpu", "cpu or cuda", pattern=_DEVICES)
    num_threads: int = option(0, "CPU threads of the draft model; 0 = all cores", low=0)
    max_num_seqs: int = option(64, "most sequences open at once, over all lanes", low=1)
    prefill_chunk: int = option(256, "most prompt tokens the draft model computes between two rounds", low=1)
    kv_cache_memory: int = option(1 << 30, "bytes for the draft model's paged KV cache", low=1, high=_MAX_BYTES)
    max_message_mb: int = option(64, "largest gRPC message in MiB", low=1, high=_MAX_MESSAGE_MB)
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; see the README's table")

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_addresses("listen", self.listen, lowest_port=0)


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator's section."""

    listen: tuple[str, ...] = option((f"127.0.0.1:{DEFAULT_PORT}",), "addresses to serve on: host:port or unix:path")
    verifiers: tuple[str, ...] = option((), "verifier addresses, one lane each")
    drafters: tuple[str, ...] = option((), "drafter addresses; none = plain decoding")
    coordinator_id: str = option("coordinator", "name under which this coordinator holds its verifiers", pattern=".+")
    max_num_seqs: int = option(0, "most running sequences a lane; 0 = the verifier's limit", low=0)
    max_num_batched_tokens: int = option(0, "most tokens a round; 0 = the verifier's limit", low=0)
    max_queue: int = option(1024, "most waiting sequences (choices of requests) before new requests are refused", low=1)
    max_stream_backlog: int = option(1024, "most undelivered tokens of a stream before the sequence waits for its client", low=1)
    max_outstanding_rounds: int = option(2, "rounds in flight a lane (W)", low=1)
    min_draft_wait_ms: float = option(5.0, "least time that a step waits for a drafter; the wait is max(this, 3 x predicted)", low=0)
    verifier_wait_s: float = option(60.0, "how long running requests wait for a lost verifier before they fail", low=0)
    max_message_mb: int = option(64, "largest gRPC message in MiB", low=1, high=_MAX_MESSAGE_MB)
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; see the README's table")

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_addresses("listen", self.listen, lowest_port=0)
        for name in ("verifiers", "drafters"):
            _check_addresses(name, getattr(self, name), lowest_port=1, may_be_empty=True)


def flags(config: object) -> list[str]:
    """The command-line flags that rebuild this configuration: one for every field that differs from its default."""
    arguments: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value != field.default:
            # One argument, not two: a value that starts with a dash would be taken for a flag.
            arguments.append(f"{_flag(field.name)}={_format(value)}")
    return arguments


def parse_flags(kind: type[Config], program: str, arguments: Sequence[str]) -> Config:
    """Builds a service's configuration from its flags; a wrong flag ends the process with status 2 and one line on stderr."""
    parser = _Parser(prog=program, description=kind.__doc__, allow_abbrev=False)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = "" if isinstance(field.default, SpeculativeConfig) else f" (default {_format(field.default) or 'none'})"
        parser.add_argument(_flag(field.name), type=_parser(hints[field.name]), default=field.default, help=f"{field.metadata['help']}{default}")
    values = vars(parser.parse_args(arguments))
    try:
        return kind(**values)
    except SpecwireError as error:
        parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the flags)\n")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _format(value: object) -> str:
    if isinstance(value, SpeculativeConfig):
        return value.to_json()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


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


def _parse_speculative(text: str) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_json(text)
    except SpecwireError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _check_fields(config: object) -> None:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, low, high, pattern = getattr(config, field.name), field.metadata["low"], field.metadata["high"], field.metadata["pattern"]
        # Written so that NaN is refused too.
        if low is not None and not low <= value <= high:
            raise InvalidArgumentError(f"{_flag(field.name)} is {value}, but must be a number from {low} to {high} ({field.metadata['help']})")
        if isinstance(value, str) and not _is_unicode(value):
            raise InvalidArgumentError(f"{_flag(field.name)} is {value!r}, which is no UTF-8; write it in UTF-8")
        if pattern is not None and not re.fullmatch(pattern, value):
            raise InvalidArgumentError(f"{_flag(field.name)} is {value!r}, but must be: {field.metadata['help']}")


def _is_unicode(text: str) -> bool:
    """Whether a message can carry it: arguments that are no UTF-8 reach Python as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_addresses(name: str, addresses: tuple[str, ...], lowest_port: int, may_be_empty: bool = False) -> None:
    if not addresses and not may_be_empty:
        raise InvalidArgumentError(f"{_flag(name)} is empty; give at least one address, host:port or unix:path")
    for address in addresses:
        if not _is_unicode(address):
            raise InvalidArgumentError(f"{_flag(name)} has {address!r}, which is no UTF-8; write it in UTF-8")
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            if not path or len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
                raise InvalidArgumentError(
                    f"{_flag(name)} has {address!r}, whose path has {len(path.encode())} bytes, but a socket's path must have 1 to "
                    f"{_MAX_SOCKET_PATH_BYTES}; choose another folder"
                )
            continue
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not lowest_port <= int(port) <= 65535:
            raise InvalidArgumentError(f"{_flag(name)} has {address!r}, but must be unix:path or host:port with a port from {lowest_port} to 65535")
    if len(set(addresses)) < len(addresses):
        raise InvalidArgumentError(f"{_flag(name)} is {','.join(addresses)!r}, which names an address twice; remove one")
