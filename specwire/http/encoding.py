"""Prompts as token ids, without holding up streams: a long text takes milliseconds, and gets a thread."""

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

from specwire.client import Chat, prompts
from specwire.errors import InvalidArgumentError
from specwire.http.failures import Refusal
from specwire.tokenizer import Tokenizer

Result = TypeVar("Result")

_LONG_TEXT = 20_000
"""Characters."""
_CHARS_PER_TOKEN = 16
"""Nearly any text has several times as many tokens."""
_MOST_CHARS_PER_TOKEN = 64
"""Not even blanks have fewer tokens."""
MAX_TEXT = 2_000_000
"""Characters that /tokenize takes: a million tokens are a gigabyte while they are found."""


async def encode(prompt: str | list[int] | Chat, tokenizer: Tokenizer | None, max_model_len: int = 0) -> list[int]:
    """Token ids of a prompt.

    Args:
        max_model_len: more ids are not looked at one by one, and not sent: they are too many whatever they are; 0 = the coordinator says so.

    Raises:
        Refusal: there is no tokenizer for it.
        SpecwireError: as of the client's own prompts.
    """
    if isinstance(prompt, list):
        _check_length(len(prompt), max_model_len)
    checked = prompts.check_prompt(prompt)
    if isinstance(checked, list):
        return prompts.encode_prompt(checked, tokenizer, "")
    if tokenizer is None:
        text = "no tokenizer is served, so that neither text nor messages can be read; send token ids to /v1/completions"
        raise Refusal(text, param="messages" if isinstance(checked, Chat) else "prompt", code="unsupported")
    if isinstance(checked, Chat):
        size = len(str(checked.messages)) + len(str(checked.tools))
        text = await _run(size, functools.partial(prompts.render_chat, checked, tokenizer))
    else:
        text = checked
    await _check_beginning(text, tokenizer, max_model_len)
    # Templates write special tokens themselves.
    encode_all = functools.partial(prompts.encode_text, text, tokenizer, add_special_tokens=checked is text)
    token_ids = await _run(len(text), encode_all)
    _check_length(len(token_ids), max_model_len)
    return token_ids


async def encode_text(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, of which there may be none. Raises InvalidArgumentError for what is no Unicode, Refusal for what is too long."""
    if len(text) > MAX_TEXT:
        raise Refusal(f"prompt has {len(text)} characters, but may have {MAX_TEXT}; send it in parts", param="prompt")
    prompts.check_prompt(text)
    return await _run(len(text), functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens))


async def decode(token_ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of token ids, special tokens included."""
    return await _run(len(token_ids), functools.partial(tokenizer.decode, token_ids, skip_special_tokens=False))


async def token_texts(token_ids: list[int], tokenizer: Tokenizer) -> list[str | None]:
    """The vocabulary's entry of each."""
    return await _run(len(token_ids), lambda: [tokenizer.token_text(token_id) for token_id in token_ids])


async def _check_beginning(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raise InvalidArgumentError for a text whose beginning alone has far too many tokens: reading 15 MB takes seconds and a gigabyte.

    That a word is cut where the beginning ends makes a few tokens of difference, not as many as a sequence may have."""
    if not 0 < _CHARS_PER_TOKEN * max_model_len < len(text):
        return
    longest = _MOST_CHARS_PER_TOKEN * max_model_len
    if len(text) > longest:
        what = f"the prompt has {len(text)} characters, but may have {longest}: {_MOST_CHARS_PER_TOKEN} for each of the {max_model_len} tokens"
        raise InvalidArgumentError(f"{what} of a sequence; shorten it")
    beginning = text[: _CHARS_PER_TOKEN * max_model_len]
    num_tokens = await _run(len(beginning), lambda: len(tokenizer.encode(beginning)))
    if num_tokens > 2 * max_model_len:
        what = f"the prompt has {num_tokens} tokens in the first {len(beginning)} of its {len(text)} characters"
        raise InvalidArgumentError(f"{what}, but a sequence may have {max_model_len}, output included, so no token could follow; shorten it")


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if 0 < max_model_len < num_tokens:
        text = f"the prompt has {num_tokens} tokens, but a sequence may have {max_model_len}, output included, so no token could follow; shorten it"
        raise InvalidArgumentError(text)


async def _run(size: int, call: Callable[[], Result]) -> Result:
    return call() if size < _LONG_TEXT else await asyncio.to_thread(call)
