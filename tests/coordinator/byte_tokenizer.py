"""A small byte-level tokenizer, made without files: one token per byte, some longer ones, and an EOS token."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specwire.messages import TokenizerSpec
from specwire.tokenizer import Tokenizer, fingerprint

EOS = 256
LONGER = (b"ab", b"bc", b"abc", b"ca", "é".encode(), "b€".encode()[:2], "€".encode()[1:], "😀a".encode()[1:], b"c" + "é".encode()[:1])
"""Tokens 257 and following: several characters, or characters cut in the middle."""
VOCAB_SIZE = 257 + len(LONGER)


def token_bytes(token_id: int) -> bytes:
    """What a token stands for; nothing for EOS."""
    if token_id < 256:
        return bytes([token_id])
    return LONGER[token_id - 257] if token_id > EOS else b""


def ids_of(text: str) -> list[int]:
    """One token per byte."""
    return list(text.encode())


def make_spec() -> TokenizerSpec:
    symbols = _byte_symbols()
    vocab = {symbols[byte]: byte for byte in range(256)}
    vocab |= {"".join(symbols[byte] for byte in token): 257 + i for i, token in enumerate(LONGER)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"<eos>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    content = tokenizer.to_str()
    return TokenizerSpec(
        tokenizer_json=content.encode(), fingerprint=fingerprint(json.loads(content)), eos_token_ids=(EOS,), vocab_size=VOCAB_SIZE, model_id="bytes"
    )


def make_tokenizer() -> Tokenizer:
    return Tokenizer(make_spec())


def _byte_symbols() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable ones as they are, the others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
