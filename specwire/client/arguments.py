"""What callers pass, checked before anything is sent: sampling parameters by name, one set or many."""

import dataclasses
import difflib
import reprlib
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from specwire.addresses import check_address
from specwire.client.prompts import BatchItem, Prompt
from specwire.config import MAX_MESSAGE_MB
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams
from specwire.tls import TlsOptions

Prompts: TypeAlias = Iterable[Prompt | BatchItem] | AsyncIterable[Prompt | BatchItem]
"""Those of a batch."""
DEFAULT_CONCURRENCY = 256
"""Prompts of a batch on the way at once: more than most verifiers run, and a quarter of the coordinator's default queue."""
_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


def check_client(address: str, max_message_mb: int, tls: TlsOptions | None, api_key: str | None, tenant_cache_key: bytes) -> None:
    """Raise InvalidArgumentError for what a client can't be made with; the key's own value is never shown."""
    check_address("address", address)
    if isinstance(max_message_mb, bool) or not isinstance(max_message_mb, int) or not 1 <= max_message_mb <= MAX_MESSAGE_MB:
        text = f"max_message_mb is {max_message_mb!r}, but must be an integer from 1 to {MAX_MESSAGE_MB}, in MiB"
        raise InvalidArgumentError(f"{text}; 64 is the default")
    if tls is not None and not isinstance(tls, TlsOptions):
        text = f"tls is {reprlib.repr(tls)}, but must be a TlsOptions, such as TlsOptions(ca='ca.pem')"
        raise InvalidArgumentError(f"{text}; None connects without TLS")
    if api_key is not None and not isinstance(api_key, str):
        raise InvalidArgumentError(f"api_key is of type {type(api_key).__name__}, but must be text; give the key exactly as it was made")
    if not isinstance(tenant_cache_key, bytes):
        raise InvalidArgumentError(f"tenant_cache_key is {reprlib.repr(tenant_cache_key)}, but must be bytes, such as b'team-a'")


def make_params(params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
    """`params` (or the defaults) with changes by name. Lists do where SamplingParams has tuples; `stop` may be one string.

    Raises:
        InvalidArgumentError: an unknown name, with the nearest known one; or a value out of range.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidArgumentError(f"params is {params!r}, but must be a SamplingParams; give single parameters by name instead")
    for name in changes:
        if name not in _NAMES:
            nearest = difflib.get_close_matches(name, _NAMES, 1, cutoff=0.5)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"remove it, known are {', '.join(_NAMES)}"
            raise InvalidArgumentError(f"unknown sampling parameter {name}; {remedy}")
    values = {name: _plain(name, value) for name, value in changes.items()}
    return SamplingParams(**values) if params is None else params.replace(**values)


def items_of_batch(
    prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None, changes: Mapping[str, Any]
) -> tuple[Prompts, SamplingParams]:
    """The prompts of a batch, with their own parameters where there is a list of them, and the parameters of those that have none.

    Raises:
        InvalidArgumentError: as `make_params`; or there is a list of another length than the prompts, or one for prompts that can't be counted.
    """
    if params is None or isinstance(params, SamplingParams) or not isinstance(params, Sequence):
        return prompts, make_params(params, changes)
    if isinstance(prompts, AsyncIterable):
        raise InvalidArgumentError("params is a list, but the prompts come one by one; send BatchItem(prompt, params) for each")
    prompts = list(prompts)
    if len(params) != len(prompts):
        text = f"params lists {len(params)} SamplingParams for {len(prompts)} prompts"
        raise InvalidArgumentError(f"{text}; give one for each prompt, or one for all")
    for each in params:
        make_params(each, changes)  # says now what is wrong with it
    return [_with_params(prompt, each) for prompt, each in zip(prompts, params, strict=True)], make_params(None, changes)


def _with_params(item: Prompt | BatchItem, params: SamplingParams) -> BatchItem:
    return dataclasses.replace(item, params=item.params or params) if isinstance(item, BatchItem) else BatchItem(item, params)


def check_concurrency(max_concurrency: int) -> int:
    """The number itself. Raises InvalidArgumentError if it is no positive integer."""
    if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1:
        text = f"max_concurrency is {max_concurrency!r}, but must be an integer of at least 1"
        raise InvalidArgumentError(f"{text}; {DEFAULT_CONCURRENCY} is the default")
    return max_concurrency


def _plain(name: str, value: Any) -> Any:
    """The value as SamplingParams takes it."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "stop" and not isinstance(value, Iterable):
        return value  # SamplingParams says what it must be
    if name in ("stop", "stop_token_ids", "allowed_token_ids") and value is not None:
        return _tuple(name, value)
    if name == "bad_words_token_ids":
        return tuple(_tuple(name, word) for word in _tuple(name, value))
    if name == "logit_bias" and not isinstance(value, Mapping):
        raise InvalidArgumentError(f"logit_bias is {value!r}, but must map token ids to numbers, such as {{50: -1.5}}")
    return value


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidArgumentError(f"{name} holds {value!r} where a list is needed; wrap it in a list")
    return tuple(value)
