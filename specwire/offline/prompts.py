"""Prompts as programs for vLLM write them, as a list of those that the client takes."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from specwire.client import Chat, Prompt
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

OfflinePrompt: TypeAlias = str | Sequence[int] | Mapping[str, Any] | Chat
"""Text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a conversation."""
_KEYS = ("prompt", "prompt_token_ids")


def list_prompts(prompts: OfflinePrompt | Sequence[OfflinePrompt]) -> list[Prompt]:
    """One prompt as a list of one; token ids as a list of integers are one prompt.

    Raises:
        InvalidArgumentError: something that is no prompt; it names the position. What is in token ids or text is checked when it is sent.
    """
    if isinstance(prompts, str | Mapping | Chat):
        return [_prompt(0, prompts)]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidArgumentError(f"prompts is {reprlib.repr(prompts)}; give text, token ids, or a list of prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return [_prompt(position, item) for position, item in enumerate(prompts)]


def list_conversations(messages: Sequence[Any]) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation as a list of one. Raises InvalidArgumentError for what is neither one nor a list of some."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError(f"messages is {reprlib.repr(messages)}; give a list of {{'role': ..., 'content': ...}}, or a list of such lists")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def check_params(sampling_params: Any, num_prompts: int) -> None:
    """Raise InvalidArgumentError unless these are parameters for all prompts, or a list with those of each."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return
    is_list = isinstance(sampling_params, Sequence) and all(isinstance(each, SamplingParams) for each in sampling_params)
    if not is_list:
        raise InvalidArgumentError(f"sampling_params is {reprlib.repr(sampling_params)}; give SamplingParams, or a list with those of each prompt")
    if len(sampling_params) != num_prompts:
        text = f"sampling_params lists {len(sampling_params)} SamplingParams for {num_prompts} prompts"
        raise InvalidArgumentError(f"{text}; give one for each prompt, or one for all")


def prompt_text(prompt: Prompt, token_ids: Sequence[int], tokenizer: "Tokenizer | None") -> str | None:
    """Text as it is, a conversation in the model's template; None of token ids, or where there is no tokenizer to read the template's tokens."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(token_ids, skip_special_tokens=False) if isinstance(prompt, Chat) and tokenizer is not None else None


def prompt_token_ids(prompt: Prompt) -> list[int]:
    """Of a prompt that was given as token ids, else none."""
    return [] if isinstance(prompt, str | Chat) else list(prompt)


def _prompt(position: int, item: Any) -> Prompt:
    if isinstance(item, str | Chat):
        return item
    if isinstance(item, Mapping):
        if len(given := [key for key in _KEYS if item.get(key) is not None]) != 1 or set(item) - set(_KEYS):
            raise InvalidArgumentError(f"prompt {position} is {reprlib.repr(dict(item))}; give exactly one of {' and '.join(_KEYS)}")
        return _prompt(position, item[given[0]])
    if isinstance(item, bytes) or not isinstance(item, Sequence):
        raise InvalidArgumentError(f"prompt {position} is {reprlib.repr(item)}; give text, token ids, a mapping or a Chat")
    return cast(Sequence[int], item)
