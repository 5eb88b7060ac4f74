"""What single tokens stand for: their bytes, and a text for them also where they are parts of characters."""

import re

from specwire.tokenizer import REPLACEMENT, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Token ids as they are shown beside log-probabilities; each is looked up once.

    Args:
        tokenizer: the served one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        # Some decoders drop a space at the beginning: a token's text is what it adds to another one's.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode(self._before))

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text, in UTF-8; not whole characters for some."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """The same as text. Parts of characters are written as OpenAI does, `bytes:\\xf0\\x9f`, so that no two of them look alike."""
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _look_up(self, token_id: int) -> bytes:
        text = self._decode([*self._before, token_id])[self._skipped :]
        if REPLACEMENT not in text:
            return text.encode()
        entry = self._tokenizer.token_text(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(entry):
            return bytes([int(match[1], 16)])
        if entry and all(symbol in _SYMBOL_BYTES for symbol in entry):
            return bytes(_SYMBOL_BYTES[symbol] for symbol in entry)
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _symbol_bytes() -> dict[str, int]:
    """The characters with which byte-level vocabularies write bytes: printable ones as they are, the others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return {chr(byte) if byte in printable else chr(next(shifted)): byte for byte in range(256)}


_SYMBOL_BYTES = _symbol_bytes()
