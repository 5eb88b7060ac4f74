"""Where the latest tokens occurred before, and the draft that these occurrences speak for.

SuffixDecoding (https://arxiv.org/abs/2411.04975) without its trees: a path's count in a suffix tree is its number of occurrences, and
those that count are found faster than a tree is kept. So an own text needs no index and no memory beside its tokens.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tokens import PaddedTokens, TokenArray

MAX_OCCURRENCES = 32
"""Frequencies are those of the latest so many occurrences of a match: bounds the time, and lets newer text speak."""
SAME_TOTAL = 1e-9
"""Sums of probabilities that differ by less are equal but for rounding."""
NO_TOKEN = -1
"""Where a text ends."""
NO_CONTEXT = -2
"""In front of a sequence's first token."""
_UNEQUAL = -3
"""Equals nothing."""

Ends = NDArray[np.intp]
"""Occurrences of a match by the indices behind them, ascending."""


class Path(NamedTuple):
    """Tokens that may follow a match, with a score each (see `Drafts`) and the sum of their probabilities."""

    token_ids: list[int]
    scores: list[float]
    total: float


NO_PATH = Path([], [], 0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a match is trusted.

    Args:
        max_depth: most tokens of a match and its draft together.
        max_spec_factor: most draft tokens a token of the match.
        min_token_prob: smallest probability that all of the draft up to a token follows the match.
    """

    max_depth: int
    max_spec_factor: float
    min_token_prob: float

    def num_drafts(self, most: int) -> list[int]:
        """By length of match from 0 to max_depth - 1: most tokens behind it, where `most` are asked for."""
        return [min(most, int(length * self.max_spec_factor + 1e-6), self.max_depth - length) for length in range(self.max_depth)]


class Windows:
    """Reads what stands around occurrences. Matches count up to max_depth - 1 tokens; `num_next` tokens behind them are read."""

    def __init__(self, max_depth: int, num_next: int) -> None:
        self.pad = max(max_depth, num_next)
        self._depth = max_depth
        self._before = np.arange(-1, -max_depth - 1, -1) + self.pad
        self._behind = np.arange(num_next) + self.pad

    def context(self, text: PaddedTokens) -> TokenArray:
        """[max_depth] the text's latest tokens, the latest first. The last one equals nothing, so that every comparison has an end."""
        end = self.pad + text.num_tokens
        latest = text.array[end - self._depth : end][::-1].copy()
        latest[-1] = _UNEQUAL
        return latest

    def lengths(self, text: PaddedTokens, ends: Ends, context: TokenArray) -> Ends:
        """How many of the latest tokens each occurrence matches."""
        return (text.array[ends[:, None] + self._before] == context).argmin(axis=1)

    def following(self, text: PaddedTokens, ends: Ends) -> TokenArray:
        """[len(ends), num_next] the tokens behind the occurrences, NO_TOKEN from the text's end on."""
        return text.array[ends[:, None] + self._behind]

    def own_occurrences(self, text: PaddedTokens, context: TokenArray) -> Ends:
        """Earlier occurrences of the text's suffixes with 1 to max_depth - 1 tokens: of each length at least the latest MAX_OCCURRENCES.

        Whole-array comparisons, one for each length until few enough are left: as long as nothing is crowded it is a single one.
        """
        tokens = text.tokens
        num_tokens = len(tokens)
        if num_tokens < 2:
            return np.empty(0, dtype=np.intp)
        matches = tokens[:-1] == tokens[-1]  # [n - m] whether the last m tokens also stand from this index on
        ends = _latest(matches) + 1
        if len(ends) < MAX_OCCURRENCES:
            return ends
        found = set(ends.tolist())
        num_known = int(self.lengths(text, ends, context).min())  # up to this length, these are the latest ones
        for m in range(2, min(self._depth, num_tokens)):
            if num_known >= self._depth - 1:
                break
            matches = np.logical_and(tokens[: num_tokens - m] == tokens[num_tokens - m], matches[1:])
            if m > num_known:
                ends = _latest(matches) + m
                found.update(ends.tolist())
                if len(ends) < MAX_OCCURRENCES:
                    break
                num_known = int(self.lengths(text, ends, context).min())
        return np.array(sorted(found), dtype=np.intp)


class ArraySearch:
    """Finds drafts by whole-array comparisons.

    Args:
        max_num_drafts: most tokens of a draft.
    """

    def __init__(self, limits: Limits, max_num_drafts: int) -> None:
        self._limits = limits
        self._num_drafts = [limits.num_drafts(most) for most in range(max_num_drafts + 1)]
        self._windows = Windows(limits.max_depth, max_num_drafts)

    def own(self, text: PaddedTokens, most: int) -> Path:
        """The draft that earlier occurrences of the text's suffixes speak for."""
        context = self._windows.context(text)
        return self._path(text, self._windows.own_occurrences(text, context), context, most, 0.0)

    def among(self, text: PaddedTokens, ends: Ends, latest: PaddedTokens, most: int, least: float) -> Path:
        """The draft that these occurrences of the latest tokens of a sequence speak for, if the sum of its probabilities is above `least`."""
        return self._path(text, ends, self._windows.context(latest), most, least)

    def _path(self, text: PaddedTokens, ends: Ends, context: TokenArray, most: int, least: float) -> Path:
        if not len(ends):
            return NO_PATH
        lengths = self._windows.lengths(text, ends, context).tolist()
        return best_path(lengths, self._windows.following(text, ends), self._limits, self._num_drafts[most], least)


def _latest(matches: NDArray[np.bool_]) -> Ends:
    """The last MAX_OCCURRENCES indices that match, or all. Where they are crowded, a look at the end is enough."""
    start = max(0, len(matches) - 8 * MAX_OCCURRENCES)
    found = matches[start:].nonzero()[0] + start
    if start and len(found) < MAX_OCCURRENCES:
        found = matches.nonzero()[0]
    return found[-MAX_OCCURRENCES:]


def best_path(lengths: Sequence[int], following: TokenArray, limits: Limits, num_drafts: Sequence[int], least: float = 0.0) -> Path:
    """The draft with the highest sum of probabilities over all match lengths, the longest match's on ties; none unless it is above `least`.

    A path's probability is the share of the match's occurrences that go on so. The place that is drafted for counts as one of them
    that goes on otherwise: one occurrence speaks for its next token with 1/2.

    Args:
        lengths, following: as `Windows` gives them, by rising index.
        num_drafts: most tokens by length of match.
    """
    best, total = NO_PATH, least
    # Match lengths between two neighbours have the same occurrences: of them, that with the most tokens counts.
    borders = sorted({*lengths, 0}, reverse=True)
    for length, shorter in itertools.pairwise(borders):
        most = max(num_drafts[shorter + 1 : length + 1])
        if most <= total:
            continue  # a probability is less than 1
        rows = [index for index, match in enumerate(lengths) if match >= length][-MAX_OCCURRENCES:]
        if most * len(rows) > (total + SAME_TOTAL) * (len(rows) + 1):
            path = _follow(following[rows, :most].T.tolist(), length, limits.min_token_prob, total + SAME_TOTAL)
            if path.total > total + SAME_TOTAL:
                best, total = path, path.total
    return best


def _follow(columns: list[list[int]], length: int, min_prob: float, least: float) -> Path:
    """From token to token with most of the occurrences, on ties with the latest; none once the sum can't get above `least`.

    Args:
        columns: by position, the token of each occurrence.
        length: of the match.
    """
    token_ids: list[int] = []
    scores: list[float] = []
    num_all, total = len(columns[0]) + 1, 0.0
    rows: list[int] | None = None  # that went on like the draft; None = all
    for position, column in enumerate(columns):
        tokens = column if rows is None else [column[row] for row in rows]
        token, num_before = tokens[-1], len(tokens)
        num_same = tokens.count(token)
        if num_same < num_before:
            counts = Counter(reversed(tokens))  # so that of equal ones max takes the latest
            counts.pop(NO_TOKEN, None)
            token, num_same = max(counts.items(), key=_count)
            rows = [row for row in rows or range(num_before) if column[row] == token]
        if token == NO_TOKEN or num_same < min_prob * num_all:
            break
        if total + (len(columns) - position) * num_same / num_all <= least:
            return NO_PATH
        token_ids.append(token)
        # One occurrence behind a match of m tokens scores m / (m + 1), as a lookup's; of many, it is their share.
        scores.append(num_same / (num_before + 1 / (length + position)))
        total += num_same / num_all
    return Path(token_ids, scores, total)


_count = operator.itemgetter(1)
