"""What earlier requests put out: one corpus a tenant, never searched for another one; the oldest outputs go first."""

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from .suffix_match import MAX_OCCURRENCES, NO_TOKEN, Ends
from .tokens import PaddedTokens, TokenArray

ANCHORS = (4, 1)
"""Outputs are found by their latest tokens, so many of them; the second where the first finds nothing."""
_INT_BYTES = 32
"""An int beyond the small ones."""


class Corpus:
    """Outputs of one tenant, each followed by NO_TOKEN, with the places where every anchor (tokens in a row) ends.

    As in LZ77 coders: `heads` knows an anchor's latest place, `before` the one before each place. Places count from the corpus's first
    token ever; what was evicted lies below `start`, where a walk ends.
    """

    def __init__(self, pad: int) -> None:
        self.text = PaddedTokens(pad, NO_TOKEN, NO_TOKEN)
        self.num_outputs = 0
        self._base = 0  # the place of the text's first token
        self._start = 0  # the first place that is not evicted
        self._heads: tuple[dict[int, int], ...] = tuple({} for _ in ANCHORS)
        self._before: tuple[array[int], ...] = tuple(array("q") for _ in ANCHORS)

    @property
    def num_bytes(self) -> int:
        """About what it holds."""
        heads = sum(sys.getsizeof(heads) + 2 * _INT_BYTES * len(heads) for heads in self._heads)
        return heads + self.text.array.nbytes + sum(sys.getsizeof(before) for before in self._before)

    def append(self, token_ids: TokenArray, num_before: int) -> None:
        """More tokens of the latest output, which has num_before already."""
        self.num_outputs += not num_before
        first = self._base + self.text.num_tokens
        self.text.append(token_ids)
        known = min(num_before, max(ANCHORS) - 1)
        recent = self.text.tokens[first - self._base - known :].tolist()
        for heads, before, anchors in zip(self._heads, self._before, _anchors(recent, known), strict=True):
            for place, anchor in enumerate(anchors, first):
                before.append(-1 if anchor is None else heads.get(anchor, -1))
                if anchor is not None:
                    heads[anchor] = place

    def end_output(self) -> None:
        self.text.append(np.array([NO_TOKEN], dtype=np.int32))
        for before in self._before:
            before.append(-1)

    def evict(self, num_tokens: int) -> None:
        """The oldest output, which has num_tokens, goes."""
        self.num_outputs -= 1
        offset = self._start - self._base
        gone = self.text.tokens[offset : offset + num_tokens].tolist()
        for heads, anchors in zip(self._heads, _anchors(gone, 0), strict=True):
            for place, anchor in enumerate(anchors, self._start):
                if anchor is not None and heads.get(anchor) == place:
                    del heads[anchor]
        self._start += num_tokens + 1
        dead = self._start - self._base
        if 2 * dead >= self.text.num_tokens:
            self.text.drop(dead)
            for before in self._before:
                del before[:dead]
            self._base = self._start

    def occurrences(self, latest: Sequence[int]) -> Ends:
        """Where the latest tokens end in the text: the latest MAX_OCCURRENCES places at most, found by the longest of ANCHORS that is there.

        Anchors are compared by their hashes, so that there may be places in between where other tokens end.
        """
        for size, heads, before in zip(ANCHORS, self._heads, self._before, strict=True):
            place = heads.get(_key(latest[-size:]), -1)
            if len(latest) < size or place < self._start:
                continue
            ends: list[int] = []
            while place >= self._start and len(ends) < MAX_OCCURRENCES:
                ends.append(place - self._base + 1)
                place = before[place - self._base]
            ends.reverse()
            return np.array(ends, dtype=np.intp)
        return np.empty(0, dtype=np.intp)


def _key(tokens: Sequence[int]) -> int:
    return tokens[0] if len(tokens) == 1 else hash(tuple(tokens))


def _anchors(recent: list[int], known: int) -> Iterator[list[int | None]]:
    """For each size of ANCHORS what ends at each token of `recent` from the index `known` on; None where the output has too few before it."""
    for size in ANCHORS:
        ends = range(known + 1, len(recent) + 1)
        yield [_key(recent[end - size : end]) if end >= size else None for end in ends]


class PastOutputs:
    """The corpora of all tenants, bounded together.

    Outputs are indexed by `work`, in the order of their ends; until then they count, but aren't found.

    Args:
        max_requests: most outputs kept.
        max_tokens: most tokens of them; of a longer output its end is kept.
        pad: of the texts, see `Windows`.
    """

    def __init__(self, max_requests: int, max_tokens: int, pad: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._pad = pad
        self._corpora: dict[bytes, Corpus] = {}
        self._kept: deque[tuple[bytes, int]] = deque()  # whose outputs, and their tokens, the oldest first
        self._waiting: deque[tuple[bytes, TokenArray]] = deque()  # the first one's beginning may be indexed
        self._num_indexed = 0  # tokens of the first one that waits
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        return len(self._kept) + len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """About what they hold."""
        return sum(corpus.num_bytes for corpus in self._corpora.values()) + sum(output.nbytes for _, output in self._waiting)

    def corpus(self, tenant: bytes) -> Corpus | None:
        return self._corpora.get(tenant)

    def add(self, tenant: bytes, output: TokenArray) -> None:
        """Keeps an output, in the place of the oldest ones."""
        if not self._max_requests or not len(output):
            return
        output = output[-self._max_tokens :].copy()
        self._waiting.append((tenant, output))
        self.num_tokens += len(output)
        while self.num_requests > self._max_requests or self.num_tokens > self._max_tokens:
            self._evict()

    def work(self, budget: int) -> int:
        """Indexes up to `budget` tokens of what waits; how many it did."""
        num_done = 0
        while self._waiting and num_done < budget:
            tenant, output = self._waiting[0]
            corpus = self._corpora.setdefault(tenant, Corpus(self._pad))
            part = output[self._num_indexed : self._num_indexed + budget - num_done]
            corpus.append(part, self._num_indexed)
            num_done += len(part)
            self._num_indexed += len(part)
            if self._num_indexed == len(output):
                corpus.end_output()
                self._waiting.popleft()
                self._kept.append((tenant, len(output)))
                self._num_indexed = 0
        return num_done

    def _evict(self) -> None:
        if not self._kept:  # a storm of ends: the oldest is indexed first, which is the simplest way to forget it in order
            self.work(len(self._waiting[0][1]) - self._num_indexed)
        tenant, num_tokens = self._kept.popleft()
        self.num_tokens -= num_tokens
        corpus = self._corpora[tenant]
        corpus.evict(num_tokens)
        if not corpus.num_outputs:
            del self._corpora[tenant]
