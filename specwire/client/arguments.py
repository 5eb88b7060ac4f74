"""What callers pass, checked before anything is sent: sampling parameters by name, prompts as text or token ids."""

import dataclasses
import difflib
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams

_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))
_MAX_TOKEN_ID = 2**31 - 1


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
            remedy = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(_NAMES)}"
            raise InvalidArgumentError(f"unknown sampling parameter {name}; {remedy}")
    values = {name: _plain(name, value) for name, value in changes.items()}
    return SamplingParams(**values) if params is None else params.replace(**values)


def check_prompt(prompt: str | Sequence[int]) -> str | list[int]:
    """The prompt as text or as a list of ints; numpy's and torch's integers do. Whether the model has the ids is for the server to say.

    Raises:
        InvalidArgumentError: text that is not valid UTF-8, or something that is no token id; it names the position.
    """
    if not isinstance(prompt, str):
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
            raise InvalidArgumentError(f"the prompt is {reprlib.repr(prompt)}; send text or a list of integer token ids")
        return [_token_id(position, value) for position, value in enumerate(prompt)]
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the prompt is not valid UTF-8: character {error.start} is {prompt[error.start]!r}; remove it or decode the text with errors='replace'"
        ) from None
    return prompt


def _token_id(position: int, value: Any) -> int:
    try:
        token_id = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"the prompt holds {value!r} at position {position}; send text or a list of integer token ids") from None
    if not -_MAX_TOKEN_ID <= token_id <= _MAX_TOKEN_ID:
        raise InvalidArgumentError(f"the prompt holds {token_id} at position {position}, but token ids end at {_MAX_TOKEN_ID}; send valid ids")
    return token_id


def _plain(name: str, value: Any) -> Any:
    """The value as SamplingParams takes it."""
    if name == "stop" and isinstance(value, str):
        return (value,)
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
