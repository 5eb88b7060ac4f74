"""What a draft call costs: a short measurement that seeds the coordinator's waiting times and budgets (design section 4)."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specwire.messages import DraftCost, DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams

from .method import MEASUREMENT_TENANT, Ask, Method

logger = logging.getLogger(__name__)

_NUM_TOKENS = 32
_NUM_RUNS = 5
_MIN_RUNS = 3
_SIZES_SHARE = 0.6
_GRID_SHARE = 0.8
"""Of the time: until when more sequences are measured, and more K; the rest is the context's."""


class DraftProfile(NamedTuple):
    """costs by K and sequences, without context to speak of; ms_per_kv_token: what each token of context adds to each draft position."""

    costs: tuple[DraftCost, ...] = ()
    ms_per_kv_token: float = 0.0


def measure_draft_cost(
    method: Method, budget_s: float, *, chunk: int, context_len: int = 0, clock: Callable[[], float] = time.perf_counter
) -> DraftProfile:
    """Median time of up to 5 calls of `propose`, for numbers of sequences that are powers of two up to the most, small ones first: K = 1, half and
    all; then the other K; then one sequence with a longer context.

    Each ends early when its next size would pass its share of the time or the KV blocks are used up; one sequence is always measured.
    Sequences are synthetic, and closed again.

    Args:
        budget_s: time for all of it.
        chunk: most tokens of background work at once.
        context_len: tokens of context to measure behind, as far as they can be computed in time and fit; 0 = none.
        clock: seconds.
    """
    bench = _Bench(method, budget_s, chunk, clock)
    try:
        _measure_sizes(bench)
        _measure_all_k(bench)
        bench.close()
        ms_per_kv_token = _measure_context(bench, context_len)
    finally:
        bench.close()
    costs = tuple(DraftCost(k, n, ms) for (n, k), ms in sorted(bench.median_ms.items()))
    logger.info(
        "measured draft costs in %.1f s: %d numbers of sequences up to %d, %d K up to %d, %.6f ms a KV token and draft",
        bench.spent_s, len({cost.num_sequences for cost in costs}), max((cost.num_sequences for cost in costs), default=0),
        len({cost.num_draft_tokens for cost in costs}), bench.most, ms_per_kv_token,
    )  # fmt: skip
    return DraftProfile(costs, ms_per_kv_token)


class _Bench:
    """Synthetic sequences 0 to num_open - 1, and what calls took. most: the largest K."""

    def __init__(self, method: Method, budget_s: float, chunk: int, clock: Callable[[], float]) -> None:
        self.method = method
        self.clock = clock
        self.most = method.description.max_num_draft_tokens
        self.max_num_seqs = method.description.max_num_seqs
        self.num_open = 0
        self.median_ms: dict[tuple[int, int], float] = {}  # by sequences and K
        self._vocab_size = method.description.vocab_size or 1 << 15
        self._budget_s = budget_s
        self._chunk = chunk
        self._started = clock()

    @property
    def spent_s(self) -> float:
        return self.clock() - self._started

    def left_s(self, share: float = 1.0) -> float:
        """Seconds until so much of the time is spent."""
        return share * self._budget_s - self.spent_s

    def open_up_to(self, num_seqs: int, num_tokens: int) -> None:
        for seq_id in range(self.num_open, num_seqs):
            token_ids = self.token_ids(seq_id, 0, num_tokens)
            self.method.open(seq_id, DraftOpen(seq_id, 0, token_ids, num_tokens, SamplingParams(), seq_id, tenant_cache_key=MEASUREMENT_TENANT))
            self.num_open += 1
        self.catch_up()

    def catch_up(self) -> None:
        while self.method.catch_up(self._chunk):
            pass

    def token_ids(self, seq_id: int, start: int, end: int) -> list[int]:
        """Different in every sequence, so that a prefix cache does not make them one."""
        return [(seq_id * 7919 + index * 104_729) % self._vocab_size for index in range(start, end)]

    def run(self, num_seqs: int, k: int) -> list[float] | None:
        """Milliseconds of each call; None where a sequence could not be drafted for."""
        asks = [Ask(seq_id, k) for seq_id in range(num_seqs)]
        began = self.clock()
        runs: list[float] = []
        # The first call has more tokens to compute, and warms up. A slow method has no time for five of each.
        while len(runs) < 1 + _MIN_RUNS or (len(runs) < 1 + _NUM_RUNS and self.clock() - began < self._budget_s / 16):
            started = self.clock()
            drafts = self.method.propose(asks)
            runs.append((self.clock() - started) * 1e3)
            if any(answer.status is not RowStatus.OK for answer in drafts):
                return None
        return runs[1:]

    def least_s(self, num_seqs: int) -> float:
        """What `run` takes at least, for the largest K."""
        return (1 + _MIN_RUNS) * self.median_ms[num_seqs, self.most] / 1e3

    def measure(self, num_seqs: int, ks: Sequence[int]) -> bool:
        """Whether all could be drafted for; none of them counts otherwise."""
        medians: dict[tuple[int, int], float] = {}
        for k in ks:
            runs = self.run(num_seqs, k)
            if runs is None:
                return False
            medians[num_seqs, k] = statistics.median(runs)
        self.median_ms |= medians
        return True

    def close(self) -> None:
        for seq_id in range(self.num_open):
            self.method.close(seq_id)
        self.num_open = 0


def _measure_sizes(bench: _Bench) -> None:
    num_tokens = max(1, min(_NUM_TOKENS, bench.method.description.max_model_len - bench.most))
    for num_seqs in _powers_of_two(bench.max_num_seqs):
        before_s = bench.spent_s
        bench.open_up_to(num_seqs, num_tokens)
        if not bench.measure(num_seqs, sorted({1, -(-bench.most // 2), bench.most})):
            logger.info("draft costs are measured up to %d sequences: there are no KV blocks for more", num_seqs // 2)
            return
        # Twice the sequences take at most some twice the time.
        if 2 * (bench.spent_s - before_s) > bench.left_s(_SIZES_SHARE):
            return


def _measure_all_k(bench: _Bench) -> None:
    for num_seqs in sorted({num_seqs for num_seqs, _ in bench.median_ms}):
        for k in range(1, bench.most):
            if (num_seqs, k) not in bench.median_ms and (bench.least_s(num_seqs) > bench.left_s(_GRID_SHARE) or not bench.measure(num_seqs, [k])):
                return


def _measure_context(bench: _Bench, context_len: int) -> float:
    """Milliseconds that each token of context adds to each draft position; 0 where that can't be told from noise."""
    description = bench.method.description
    num_tokens = short = max(1, min(_NUM_TOKENS, description.max_model_len - bench.most))
    most_tokens = min(short + context_len, description.max_model_len - bench.most)
    if description.num_blocks:
        most_tokens = min(most_tokens, description.num_blocks * description.block_size - bench.most)
    if most_tokens < 2 * short or not bench.median_ms or 3 * bench.least_s(1) > bench.left_s():
        return 0.0
    bench.open_up_to(1, short)
    base = bench.run(1, bench.most)
    took_s = 0.0
    # Each time twice as long, until the next time would take too long.
    while base and num_tokens < most_tokens and 2 * took_s < bench.left_s() - bench.least_s(1):
        started_s = bench.spent_s
        longer = min(2 * num_tokens, most_tokens)
        bench.method.append(0, bench.token_ids(0, num_tokens, longer))
        bench.catch_up()
        num_tokens, took_s = longer, bench.spent_s - started_s
    runs = bench.run(1, bench.most) if base else None
    if not base or not runs or num_tokens == short or min(runs) <= max(base):
        return 0.0
    return (statistics.median(runs) - statistics.median(base)) / (bench.most * (num_tokens - short))


def _powers_of_two(limit: int) -> Iterator[int]:
    value = 1
    while value < limit:
        yield value
        value *= 2
    yield limit
