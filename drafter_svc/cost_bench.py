"""Synthetic sequences that a drafting method is measured with."""

import time
from collections.abc import Callable, Sequence

from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams

from .method import MEASUREMENT_TENANT, Ask, Method

NUM_RUNS = 5
_MIN_RUNS = 3
_NUM_TOKENS = 32
_MAX_GROWTH = 96
"""Tokens that commits may add to a sequence before it is opened anew: what is measured is without context to speak of."""


class CostBench:
    """Sequences 0, 1, ..., and the clock. A method's costs are taken in a steady state: what the last call has drafted is committed in part, and
    drafts are asked for again.

    Args:
        method: what is measured.
        budget_s: time for all of it, from `begin` on.
        chunk: most tokens of background work at once.
        clock: seconds.

    Attributes:
        most: the largest K.
        longest: tokens of a sequence that can be drafted for with it.
        num_tokens: of a sequence that is opened.
        lengths: of the open sequences.
    """

    def __init__(self, method: Method, budget_s: float, chunk: int, clock: Callable[[], float] = time.perf_counter) -> None:
        description = method.description
        self.method = method
        self.most = description.max_num_draft_tokens
        self.max_num_seqs = description.max_num_seqs
        self.longest = max(1, description.max_model_len - self.most)
        self.num_tokens = min(_NUM_TOKENS, self.longest)
        self.lengths: list[int] = []
        self._vocab_size = description.vocab_size or 1 << 15
        self._budget_s = budget_s
        self._chunk = chunk
        self._clock = clock
        self._started = clock()
        self._num_opened = 0
        self._drafts: dict[int, list[int]] = {}  # of the last call

    @property
    def spent_s(self) -> float:
        return self._clock() - self._started

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until so much of the time is spent."""
        return share * self._budget_s - self.spent_s

    def begin(self) -> None:
        """A call that nobody measures, since compilers and libraries may take seconds for the first one; the time begins behind it."""
        self.open_up_to(1, self.num_tokens)
        self.method.propose([Ask(0, self.most)])
        self.close()
        self._started = self._clock()

    def open_up_to(self, num_seqs: int, num_tokens: int) -> None:
        """All are computed."""
        for _ in range(len(self.lengths), num_seqs):
            self._open(num_tokens)
        self.catch_up()

    def extend(self, num_tokens: int) -> None:
        """All to so many tokens, computed."""
        for seq_id, length in enumerate(self.lengths):
            self._append(seq_id, self._token_ids(length, num_tokens))
        self.catch_up()

    def catch_up(self) -> None:
        while self.method.catch_up(self._chunk):
            pass

    def refresh(self, k: int) -> None:
        """Closes all if they are too long for a `run` of K = k."""
        if self.lengths and max(self.lengths) + self.growth(k) > min(self.longest, self.num_tokens + _MAX_GROWTH):
            self.close()

    def growth(self, k: int) -> int:
        """Tokens that a `run` of K = k commits to each sequence."""
        return (1 + NUM_RUNS) * (1 + k // 2)

    def run(self, num_seqs: int, k: int) -> list[float] | None:
        """Milliseconds of up to 5 calls, 3 at least; None where a sequence could not be drafted for."""
        asks = [Ask(seq_id, k) for seq_id in range(num_seqs)]
        began = self._clock()
        runs: list[float] = []
        # The first call warms up. A slow method has no time for five of each.
        while len(runs) < 1 + _MIN_RUNS or (len(runs) < 1 + NUM_RUNS and self._clock() - began < self._budget_s / 16):
            commits = [self._commit(seq_id, k) for seq_id in range(num_seqs)]
            started = self._clock()
            for seq_id, token_ids in enumerate(commits):
                self._append(seq_id, token_ids)
            drafts = self.method.propose(asks)
            runs.append((self._clock() - started) * 1e3)
            if any(answer.status is not RowStatus.OK for answer in drafts):
                return None
            self._drafts = {seq_id: answer.token_ids for seq_id, answer in enumerate(drafts)}
        return runs[1:]

    @staticmethod
    def least_s(call_ms: float) -> float:
        """What a `run` of such calls takes at least."""
        return (1 + _MIN_RUNS) * call_ms / 1e3

    def chunk_ms(self, num_tokens: int) -> float | None:
        """Milliseconds of a chunk of background work of so many tokens; None where the method does not do that many at once."""
        left = num_tokens
        while left > 0:
            missing = min(max(left, _NUM_TOKENS), self.longest - 1)
            self._open(missing + 1)  # the last one is not computed before drafts are asked for
            left -= max(1, missing)
        started = self._clock()
        num_computed = self.method.catch_up(num_tokens)
        took_ms = (self._clock() - started) * 1e3
        self.close()
        return took_ms if num_computed >= num_tokens else None

    def close(self) -> None:
        """All sequences."""
        for seq_id in range(len(self.lengths)):
            self.method.close(seq_id)
        self.lengths.clear()
        self._drafts = {}

    def _open(self, num_tokens: int) -> None:
        seq_id = len(self.lengths)
        self._num_opened += 1
        tokens = self._token_ids(0, num_tokens)
        self.method.open(seq_id, DraftOpen(seq_id, 0, tokens, num_tokens, SamplingParams(), seq_id, tenant_cache_key=MEASUREMENT_TENANT))
        self.lengths.append(num_tokens)

    def _append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.method.append(seq_id, token_ids)
        self.lengths[seq_id] += len(token_ids)

    def _commit(self, seq_id: int, k: int) -> list[int]:
        """Half of the drafts that the sequence got, and the target's own token."""
        length = self.lengths[seq_id]
        return [*self._drafts.get(seq_id, [])[: k // 2], *self._token_ids(length, length + 1)]

    def _token_ids(self, start: int, end: int) -> list[int]:
        """Others after each opening, so that no prefix cache has them."""
        return [(self._num_opened * 7919 + index * 104_729) % self._vocab_size for index in range(start, end)]
