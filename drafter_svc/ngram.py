"""Prompt lookup: what followed the latest tokens earlier in the context is likely to follow them again."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specwire.config import DrafterConfig
from specwire.engine.counts import PassCounts
from specwire.messages import DraftOpen, RowStatus

from .method import UNLIMITED_MODEL_LEN, Ask, Drafts, describe_lookup
from .tokens import TokenArray, to_array


def longest_suffix_match(tokens: TokenArray, min_len: int, max_len: int) -> tuple[int, int]:
    """The longest suffix of `tokens` [n] with min_len to max_len tokens that also occurs earlier (the two may overlap).

    Returns (length, end): end is the index right behind its earliest occurrence; (0, 0) where there is none. Whole-array
    comparisons, one for each length up to the longest match + 1: 32k tokens take some 10 µs without a match, and an index that
    would have to be kept up to date takes more memory than that is worth.
    """
    num_tokens = len(tokens)
    length = end = 0
    matches: NDArray[np.bool_] | None = None  # [n - m] whether the last m tokens also stand at this index
    for m in range(1, min(max_len, num_tokens - 1) + 1):
        equal = tokens[: num_tokens - m] == tokens[num_tokens - m]
        matches = equal if matches is None else np.logical_and(equal, matches[1:], out=equal)
        first = int(matches.argmax())
        if not matches[first]:
            break
        length, end = m, first + m
    return (length, end) if length >= min_len else (0, 0)


class Ngram:
    """Drafts by looking up the longest repeated suffix; on ties of length its earliest occurrence. Works on any token ids.

    A draft's score is m / (m + 1) for a match of m tokens, the same along the draft: longer matches are accepted more often, and
    how much more is for calibration to learn.

    Args:
        min_len, max_len: shortest and longest suffix that counts as a match.
        max_num_drafts: most drafts at once (K).
        max_model_len: drafts never pass this length.
        max_num_seqs: for the description.
    """

    features = None
    num_free_blocks = 0

    def __init__(self, min_len: int, max_len: int, *, max_num_drafts: int, max_model_len: int = UNLIMITED_MODEL_LEN, max_num_seqs: int = 64) -> None:
        self._min_len = min_len
        self._max_len = max_len
        self._max_num_drafts = max_num_drafts
        self._max_model_len = max_model_len
        self._contexts: dict[int, _Context] = {}
        self.counts = PassCounts()
        self.description = describe_lookup(
            "ngram", f"ngram-{min_len}-{max_len}", max_num_drafts=max_num_drafts, max_model_len=max_model_len, max_num_seqs=max_num_seqs
        )

    @classmethod
    def from_config(cls, config: DrafterConfig) -> "Ngram":
        spec = config.speculative_config
        return cls(
            spec.prompt_lookup_min,
            spec.prompt_lookup_max,
            max_num_drafts=spec.num_speculative_tokens,
            max_model_len=spec.max_model_len or UNLIMITED_MODEL_LEN,
            max_num_seqs=config.max_num_seqs,
        )

    def open(self, seq_id: int, request: DraftOpen) -> None:
        assert seq_id not in self._contexts, f"sequence {seq_id} is open already"
        self._contexts[seq_id] = _Context(request.token_ids)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._contexts[seq_id].append(token_ids)

    def close(self, seq_id: int) -> None:
        del self._contexts[seq_id]

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        return [self._propose(self._contexts[ask.seq_id].tokens, ask.num_drafts) for ask in asks]

    def catch_up(self, budget: int) -> int:
        """Nothing to do: a context is ready as soon as it is open."""
        return 0

    def _propose(self, tokens: TokenArray, num_drafts: int) -> Drafts:
        num_drafts = min(num_drafts, self._max_num_drafts, self._max_model_len - len(tokens))
        if num_drafts <= 0:
            return Drafts(RowStatus.OK)
        length, end = longest_suffix_match(tokens, self._min_len, self._max_len)
        if not length:
            return Drafts(RowStatus.OK)
        drafts = tokens[end : end + num_drafts].tolist()
        return Drafts(RowStatus.OK, drafts, [length / (length + 1)] * len(drafts))


class _Context:
    """The tokens of one sequence in a buffer that grows by doubling."""

    __slots__ = ("_buffer", "_num_tokens")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._buffer = to_array(token_ids)
        self._num_tokens = len(token_ids)

    @property
    def tokens(self) -> TokenArray:
        """[n], a view."""
        return self._buffer[: self._num_tokens]

    def append(self, token_ids: Sequence[int]) -> None:
        new = to_array(token_ids)
        num_tokens = self._num_tokens + len(new)
        if num_tokens > len(self._buffer):
            grown = np.empty(max(64, 2 * num_tokens), dtype=np.int32)
            grown[: self._num_tokens] = self.tokens
            self._buffer = grown
        self._buffer[self._num_tokens : num_tokens] = new
        self._num_tokens = num_tokens
