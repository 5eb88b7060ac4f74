"""The tokens of one sequence as an array that grows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specwire.errors import InvalidArgumentError

TokenArray = NDArray[np.int32]


def to_array(token_ids: Sequence[int]) -> TokenArray:
    """Raise InvalidArgumentError where an id is no 32-bit integer."""
    try:
        return np.array(token_ids, dtype=np.int32)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"a token id is no 32-bit integer ({error}); send ids of the served tokenizer") from error


class PaddedTokens:
    """Tokens between paddings, so that windows around any of them may be read without looking at the borders.

    Args:
        pad: how many ids of padding stand at each end.
        front, back: the padding's ids. No token's id equals them.
    """

    __slots__ = ("_back", "_pad", "array", "num_tokens")

    def __init__(self, pad: int, front: int, back: int) -> None:
        self._pad = pad
        self._back = back
        self.num_tokens = 0
        self.array: TokenArray = np.full(2 * pad, back, dtype=np.int32)
        """The tokens with their padding; token i stands at index pad + i."""
        self.array[:pad] = front

    @property
    def tokens(self) -> TokenArray:
        """[n], a view."""
        return self.array[self._pad : self._pad + self.num_tokens]

    def append(self, new: TokenArray) -> None:
        start = self._pad + self.num_tokens
        needed = start + len(new) + self._pad
        if needed > len(self.array):
            grown = np.full(needed + needed // 2, self._back, dtype=np.int32)
            grown[:start] = self.array[:start]
            self.array = grown
        self.array[start : start + len(new)] = new
        self.num_tokens += len(new)

    def drop(self, num_tokens: int) -> None:
        """The first num_tokens go."""
        kept = self.tokens[num_tokens:].copy()
        self.num_tokens = 0
        self.array = np.concatenate([self.array[: self._pad], np.full(self._pad, self._back, dtype=np.int32)])
        self.append(kept)
