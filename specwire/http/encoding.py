"""Prompts as token ids, without holding up streams: a long text takes milliseconds, and gets a thread."""

import asyncio
import functools
from collections.abc import Callable

from specwire.client import Chat
from specwire.client.prompts import check_prompt, encode_prompt
from specwire.http.failures import Refusal
from specwire.tokenizer import Tokenizer

_LONG_TEXT = 20_000
"""Characters."""


async def encode(prompt: str | list[int] | Chat, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt.

    Raises:
        Refusal: there is no tokenizer for it.
        SpecwireError: as of the client's own prompts.
    """
    checked = check_prompt(prompt)
    if isinstance(checked, list):
        return encode_prompt(checked, tokenizer, "")
    if tokenizer is None:
        text = "no tokenizer is served, so that neither text nor messages can be read; send token ids to /v1/completions"
        raise Refusal(text, param="messages" if isinstance(checked, Chat) else "prompt", code="unsupported")
    size = len(checked) if isinstance(checked, str) else sum(len(str(message.get("content"))) for message in checked.messages)
    return await _run(size, functools.partial(encode_prompt, checked, tokenizer, ""))


async def encode_text(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, of which there may be none. Raises InvalidArgumentError for what is no Unicode."""
    check_prompt(text)
    return await _run(len(text), functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens))


async def _run(size: int, call: Callable[[], list[int]]) -> list[int]:
    return call() if size < _LONG_TEXT else await asyncio.to_thread(call)
