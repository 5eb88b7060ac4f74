"""Log-probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any

from specwire.http.token_text import TokenTexts
from specwire.messages import TokenLogprobs
from specwire.tokenizer import IncrementalDecoder, Tokenizer


def chat_logprobs(texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Of a chat's choice: one entry a token."""
    entries = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = [_entry(texts, other, logprob) for other, logprob in entry.top]
        entries.append(_entry(texts, token_id, entry.sampled) | {"top_logprobs": top})
    return {"content": entries, "refusal": None}


class CompletionLogprobs:
    """Of a completion's choice: parallel lists, a part for each piece of a stream.

    Args:
        tokenizer: the served one.
        texts: of its tokens.
        offset: of the choice's first character in its text (behind an echoed prompt).
    """

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, offset: int = 0) -> None:
        self._decoder: IncrementalDecoder = tokenizer.incremental_decoder()
        self._texts = texts
        self._offset = offset

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens. A token's offset is where its text begins; one inside of a character has that of the character."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token_id))
        return {
            "tokens": [self._texts.text_of(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(entry.sampled) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text: of two tokens with the same one, the likelier."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(self._texts.text_of(token_id), _finite(logprob))
        return top


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text_of(token_id), "logprob": _finite(logprob), "bytes": list(texts.bytes_of(token_id))}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI sends this for what is next to impossible."""
    return max(logprob, -9999.0)
