"""The search of `suffix_match`, compiled by Numba: the same drafts from the same texts, without the interpreter's lock."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from specwire.engine.cpu.compiled import keep_compiled

from .suffix_match import MAX_OCCURRENCES, NO_PATH, NO_TOKEN, SAME_TOTAL, Ends, Limits, Path
from .tokens import PaddedTokens

_BLOCK = 256
"""Places that are compared at once."""
_OPTIONS = {"nogil": True, "boundscheck": False, "cache": keep_compiled()}


class CompiledSearch:
    """As `ArraySearch`. Compiles when it is made, so that no request waits for it.

    Args:
        max_num_drafts: most tokens of a draft.
        pad: of the texts.
    """

    def __init__(self, limits: Limits, max_num_drafts: int, pad: int) -> None:
        self._pad, self._depth, self._min_prob = pad, limits.max_depth, float(limits.min_token_prob)
        self._num_drafts = [np.array(limits.num_drafts(most), dtype=np.int64) for most in range(max_num_drafts + 1)]
        num_places = MAX_OCCURRENCES * limits.max_depth
        self._ends, self._lengths = np.empty(num_places, dtype=np.int64), np.empty(num_places, dtype=np.int64)
        self._tokens, self._scores = np.empty((2, max_num_drafts), dtype=np.int32), np.empty((2, max_num_drafts), dtype=np.float64)
        text = PaddedTokens(pad, NO_TOKEN, NO_TOKEN)
        text.append(np.zeros(3, dtype=np.int32))
        self.own(text, max_num_drafts)
        self.among(text, np.array([1], dtype=np.int64), text, max_num_drafts, 0.0)

    def own(self, text: PaddedTokens, most: int) -> Path:
        """The draft that earlier occurrences of the text's suffixes speak for."""
        num_places = _own_places(text.array, self._pad, text.num_tokens, self._depth, self._ends, self._lengths)
        return self._best(text, num_places, most, 0.0)

    def among(self, text: PaddedTokens, ends: Ends, latest: PaddedTokens, most: int, least: float) -> Path:
        """The draft that these occurrences of the latest tokens of a sequence speak for, if the sum of its probabilities is above `least`."""
        _given_places(text.array, latest.array, self._pad, latest.num_tokens, self._depth, ends, self._ends, self._lengths)
        return self._best(text, len(ends), most, least)

    def _best(self, text: PaddedTokens, num_places: int, most: int, least: float) -> Path:
        if not num_places:
            return NO_PATH
        count, row, total = _best_path(
            text.array, self._pad, self._ends, self._lengths, num_places, self._num_drafts[most], self._min_prob, least, self._tokens, self._scores
        )
        return Path(self._tokens[row, :count].tolist(), self._scores[row, :count].tolist(), total) if count else NO_PATH


@njit(**_OPTIONS)
def _match_length(array: NDArray[np.int32], end: int, latest: NDArray[np.int32], latest_end: int, most: int) -> int:
    """How many tokens in front of two places (of the arrays) are the same."""
    length = 0
    while length < most and array[end - 1 - length] == latest[latest_end - 1 - length]:
        length += 1
    return length


@njit(**_OPTIONS)
def _compare(tokens: NDArray[np.int32], token: int, same: NDArray[np.bool_]) -> int:
    """Notes which tokens are this one; how many."""
    count = 0
    for place in range(len(tokens)):
        is_same = tokens[place] == token
        same[place] = is_same
        count += is_same
    return count


@njit(**_OPTIONS)
def _compare_again(tokens: NDArray[np.int32], token: int, same: NDArray[np.bool_]) -> int:
    """Leaves those noted that are this one; how many."""
    count = 0
    for place in range(len(tokens)):
        is_same = same[place] & (tokens[place] == token)
        same[place] = is_same
        count += is_same
    return count


@njit(**_OPTIONS)
def _own_places(array: NDArray[np.int32], pad: int, num_tokens: int, depth: int, ends: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    """Of each length of match at least the latest MAX_OCCURRENCES places, the latest first; how many there are.

    A place is of use only if it matches more tokens than MAX_OCCURRENCES later ones do: a block is compared from token to token as long as
    a place of it may.
    """
    most = min(depth, num_tokens) - 1
    if most < 1:
        return 0
    num_matching = np.zeros(depth + 1, dtype=np.int64)  # places found that match at least so many tokens; never rises
    same = np.empty(_BLOCK, dtype=np.bool_)
    num_places, num_known, behind, last = 0, 0, num_tokens, pad + num_tokens - 1
    while behind > 1 and num_known < most:
        first = max(1, behind - _BLOCK)
        width = behind - first
        start = pad + first - 1
        num_left = _compare(array[start : start + width], array[last], same)
        for offset in range(1, num_known + 1):
            if not num_left:
                break
            num_left = _compare_again(array[start - offset : start - offset + width], array[last - offset], same)
        if num_left:
            for place in range(width - 1, -1, -1):
                if not same[place]:
                    continue
                length = _match_length(array, pad + first + place, array, last + 1, most)
                if num_matching[length] < MAX_OCCURRENCES:
                    ends[num_places], lengths[num_places] = first + place, length
                    num_places += 1
                    num_matching[1 : length + 1] += 1
            while num_known < most and num_matching[num_known + 1] >= MAX_OCCURRENCES:
                num_known += 1
        behind = first
    return num_places


@njit(**_OPTIONS)
def _given_places(
    array: NDArray[np.int32],
    latest: NDArray[np.int32],
    pad: int,
    num_latest: int,
    depth: int,
    given: NDArray[np.int64],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Writes given places (ascending) the latest first, and how many of the latest tokens each matches."""
    for index in range(len(given)):
        end = given[len(given) - 1 - index]
        ends[index] = end
        lengths[index] = _match_length(array, pad + end, latest, pad + num_latest, depth - 1)


@njit(**_OPTIONS)
def _best_path(
    array: NDArray[np.int32],
    pad: int,
    ends: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_places: int,
    num_drafts: NDArray[np.int64],
    min_prob: float,
    least: float,
    tokens: NDArray[np.int32],
    scores: NDArray[np.float64],
) -> tuple[int, int, float]:
    """As `best_path`; places are the latest first. Writes to the two rows of tokens and scores in turn.

    Returns:
        Tokens of the draft (0 = none), the row where it is, the sum of its probabilities.
    """
    best_count, best_row, total = 0, 1, least
    rows = np.empty(MAX_OCCURRENCES, dtype=np.int64)
    length = 0
    for index in range(num_places):
        length = max(length, lengths[index])
    while length > 0:
        shorter, num_rows = 0, 0
        for index in range(num_places):
            if lengths[index] < length:
                shorter = max(shorter, lengths[index])
            elif num_rows < MAX_OCCURRENCES:
                rows[num_rows] = ends[index]
                num_rows += 1
        most = 0
        for match in range(shorter + 1, length + 1):
            most = max(most, num_drafts[match])
        if most > total and most * num_rows > (total + SAME_TOTAL) * (num_rows + 1):
            row = 1 - best_row
            count, path_total = _follow(array, pad, rows, num_rows, most, length, min_prob, total + SAME_TOTAL, tokens[row], scores[row])
            if path_total > total + SAME_TOTAL:
                best_count, best_row, total = count, row, path_total
        length = shorter
    return best_count, best_row, total


@njit(**_OPTIONS)
def _follow(
    array: NDArray[np.int32],
    pad: int,
    rows: NDArray[np.int64],
    num_rows: int,
    most: int,
    length: int,
    min_prob: float,
    least: float,
    tokens: NDArray[np.int32],
    scores: NDArray[np.float64],
) -> tuple[int, float]:
    """As `_follow` of `suffix_match`; rows are the latest first, and lose those that go on otherwise. Returns (0, 0.0) for no path."""
    num_all, total = num_rows + 1, 0.0
    for position in range(most):
        token, num_same = NO_TOKEN, 0
        for row in range(num_rows):  # the first of equal counts is the latest
            candidate, count = array[pad + rows[row] + position], 0
            if candidate in (NO_TOKEN, token):
                continue
            for other in range(row, num_rows):
                count += array[pad + rows[other] + position] == candidate
            if count > num_same:
                token, num_same = candidate, count
        if token == NO_TOKEN or num_same < min_prob * num_all:
            return position, total
        if total + (most - position) * num_same / num_all <= least:
            return 0, 0.0
        tokens[position] = token
        scores[position] = num_same / (num_rows + 1 / (length + position))
        total += num_same / num_all
        num_kept = 0
        for row in range(num_rows):
            if array[pad + rows[row] + position] == token:
                rows[num_kept] = rows[row]
                num_kept += 1
        num_rows = num_kept
    return most, total
