"""Prompts as callers give them, text, token ids or a conversation: checked before anything is sent, encoded with the served tokenizer."""

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

_MAX_TOKEN_ID = 2**31 - 1
_EMPTY = "the prompt is empty; send at least one token"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a prompt: the served tokenizer's chat template makes the text of it. It goes wherever a prompt does.

    Args:
        messages: {"role": ..., "content": ...} in order, with whatever else the model's template reads.
        tools: JSON schemas of functions that the model may call, for templates that know tools.
        add_generation_prompt: end with the beginning of the assistant's answer.
        chat_template_kwargs: further variables that the template knows (enable_thinking, say).

    Raises:
        InvalidArgumentError: there are no messages, or one is no mapping with a role and something else; it names the position.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.messages, (str, bytes, Mapping)) or not isinstance(self.messages, Sequence):
            raise InvalidArgumentError(f"messages is {reprlib.repr(self.messages)}; send a list of {{'role': ..., 'content': ...}}")
        if not self.messages:
            raise InvalidArgumentError("messages is empty; send at least one message")
        for position, message in enumerate(self.messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                shown = reprlib.repr(message)
                raise InvalidArgumentError(f"messages holds {shown} at position {position}; send a mapping with a role, such as user, and content")
            if len(message) == 1:
                shown = reprlib.repr(message)
                raise InvalidArgumentError(f"messages holds {shown} at position {position}, which has no key 'content'; add it")


Prompt: TypeAlias = str | Sequence[int] | Chat
"""What a caller may send."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A prompt of a batch with what it has of its own; what is left out is the batch's.

    Args:
        prompt: text, token ids, or a Chat.
        params: sampling parameters.
        timeout: seconds from when it is sent.
        request_id: a label for logs and traces.
    """

    prompt: Prompt
    params: SamplingParams | None = None
    timeout: float | None = None
    request_id: str = ""


CheckedPrompt: TypeAlias = str | list[int] | Chat


def check_prompt(prompt: Prompt) -> CheckedPrompt:
    """The prompt with token ids as a list of ints; numpy's and torch's integers do. Whether the model has the ids is for the server to say.

    Raises:
        InvalidArgumentError: text that is not valid UTF-8, or something that is no token id; it names the position.
    """
    if isinstance(prompt, Chat):
        return prompt
    if isinstance(prompt, str):
        return _check_text(prompt)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise InvalidArgumentError(f"the prompt is {reprlib.repr(prompt)}; send text, a list of integer token ids or a Chat")
    return [_token_id(position, value) for position, value in enumerate(prompt)]


def encode_prompt(prompt: CheckedPrompt, tokenizer: "Tokenizer | None", address: str) -> list[int]:
    """Token ids of a prompt.

    Raises:
        UnsupportedError: it is text or a conversation, and no tokenizer is served.
        FailedPreconditionError: it is a conversation, and the model has no chat template.
        InvalidArgumentError: there are no tokens in it, or the template refuses the conversation.
    """
    if isinstance(prompt, list):
        token_ids = prompt
    elif tokenizer is None:
        kind = "a conversation" if isinstance(prompt, Chat) else "text"
        raise UnsupportedError(f"the prompt is {kind}, but the coordinator at {address} serves no tokenizer; send token ids")
    elif isinstance(prompt, str):
        return encode_text(prompt, tokenizer, add_special_tokens=True)
    else:
        return encode_text(render_chat(prompt, tokenizer), tokenizer, add_special_tokens=False)  # the template writes them itself
    if not token_ids:
        raise InvalidArgumentError(_EMPTY)
    return token_ids


def render_chat(chat: Chat, tokenizer: "Tokenizer") -> str:
    """The text of a conversation. Raises FailedPreconditionError and InvalidArgumentError as `encode_prompt`."""
    text = tokenizer.render_chat(
        chat.messages, tools=chat.tools, add_generation_prompt=chat.add_generation_prompt, variables=chat.chat_template_kwargs
    )
    return _check_text(text)


def encode_text(text: str, tokenizer: "Tokenizer", *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises InvalidArgumentError if there are none."""
    token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidArgumentError(_EMPTY)
    return token_ids


def check_label(name: str, label: str) -> str:
    """The label itself. Raises InvalidArgumentError if it is no text, or not valid UTF-8."""
    if not isinstance(label, str):
        raise InvalidArgumentError(f"{name} is {reprlib.repr(label)}, but must be text; put it in quotes, or leave it out")
    try:
        label.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} is {label!r}, which is not valid UTF-8 at character {error.start}; send valid text") from None
    return label


def _check_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the prompt is not valid UTF-8: character {error.start} is {text[error.start]!r}; remove it or decode the text with errors='replace'"
        ) from None
    return text


def _token_id(position: int, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        token_id = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"the prompt holds {value!r} at position {position}; send text or a list of integer token ids") from None
    if not -_MAX_TOKEN_ID <= token_id <= _MAX_TOKEN_ID:
        raise InvalidArgumentError(f"the prompt holds {token_id} at position {position}, but token ids end at {_MAX_TOKEN_ID}; send valid ids")
    return token_id
