"""Values of bodies, as sampling and chat templates take them."""

import json
from collections.abc import Mapping
from typing import Any

from specwire.errors import InvalidArgumentError
from specwire.http.failures import Refusal
from specwire.text import is_unicode
from specwire.tokenizer import Tokenizer

MAX_BAD_WORDS = 1024
"""Of one request: half of what sampling takes, since most words are two sequences of tokens."""
_MAX_BAD_CHARACTERS = 65_536
_MAX_BIASES = 300_000  # more than any vocabulary has


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: with what is null left out, content as one text, and arguments of tools as objects. An answer that had
    nothing but calls of tools has empty content.

    Raises:
        Refusal: content that is no text.
    """
    return [_read_message(message, position) for position, message in enumerate(messages)]


def _read_message(message: dict[str, Any], position: int) -> dict[str, Any]:
    read = {key: value for key, value in message.items() if value is not None}
    if isinstance(read.get("content"), list):
        read["content"] = _join(read["content"], position)
    if isinstance(read.get("tool_calls"), list):
        read["tool_calls"] = [_read_call(call) for call in read["tool_calls"]]
        read.setdefault("content", "")
    return read


def _read_call(call: object) -> object:
    """A call whose arguments are an object: OpenAI has them as JSON text. Text that is no object stays what it is, as the model wrote it."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _join(content: list[Any], position: int) -> str:
    """Parts of text as lines."""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            text = f"messages[{position}].content has a part of type {str(kind)[:40]!r}, but the model reads only text"
            raise Refusal(f"{text}; send parts such as {{'type': 'text', 'text': ...}}", param="messages", code="unsupported_parameter")
    return "\n".join(part["text"] for part in content)


def read_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """By token id: keys of JSON objects are text."""
    if len(biases) > _MAX_BIASES:
        raise Refusal(f"logit_bias has {len(biases)} token ids, but may have {_MAX_BIASES}; send fewer", param="logit_bias")
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise Refusal(f"logit_bias has the key {key[:40]!r}, but keys must be token ids such as '42'; use /tokenize", param="logit_bias")
    read = {int(key): bias for key, bias in biases.items()}
    if len(read) < len(biases):
        raise Refusal(f"logit_bias has {len(biases)} keys for {len(read)} token ids; write each id once, without leading zeros", param="logit_bias")
    return read


def encode_bad_words(words: list[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and after a space where that makes another token of it."""
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidArgumentError("bad_words needs a tokenizer, but the coordinator serves no tokenizer; leave it out")
    num_characters = sum(map(len, words))
    for what, number, most in (("words", len(words), MAX_BAD_WORDS), ("characters", num_characters, _MAX_BAD_CHARACTERS)):
        if number > most:
            raise Refusal(f"bad_words has {number} {what}, but may have {most}; send fewer, or ban single tokens by logit_bias", param="bad_words")
    encoded: list[tuple[int, ...]] = []
    for word in words:
        if not is_unicode(word):
            raise Refusal(f"bad_words holds {word[:40]!r}, which is not valid UTF-8; send valid text", param="bad_words")
        text = word.strip(" ")
        plain = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()
        if not plain:
            raise Refusal("bad_words holds a word without characters; remove it", param="bad_words")
        spaced = tuple(tokenizer.encode(f" {text}", add_special_tokens=False))
        encoded.append(plain)
        if len(spaced) == len(plain) and spaced != plain:
            encoded.append(spaced)
    return tuple(encoded)
