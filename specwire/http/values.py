"""Values of bodies, as sampling and chat templates take them."""

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


def with_text(message: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    """The message with its content as one text, which is what templates read. Parts are lines of it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            text = f"messages[{position}].content has a part of type {str(kind)[:40]!r}, but the model reads only text"
            raise Refusal(f"{text}; send parts such as {{'type': 'text', 'text': ...}}", param="messages", code="unsupported_parameter")
    return {**message, "content": "\n".join(part["text"] for part in content)}


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
