"""What a draft call costs: a short measurement that seeds the coordinator's waiting times and budgets (design section 4)."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specwire.messages import DraftCost

from .cost_bench import NUM_RUNS, CostBench
from .method import Method

logger = logging.getLogger(__name__)

_SIZES_SHARE = 0.6
_GRID_SHARE = 0.75
_CHUNK_SHARE = 0.85
"""Of the time: until when more sequences are measured, more K, and larger chunks; the rest is the context's."""
_MIN_CHUNK = 32
_MIN_CHUNK_MS = 4.0
_FLAT = 1.25
"""A chunk that takes so many times what the smallest one takes does more work in the same time: a smaller one would delay replies as long."""
_CALLS_PER_CHUNK = 2.0
"""A chunk may take so long, or so many of the smallest calls: coordinators wait 5 ms by default, and three times as long as a call should take, so
that the answer to one that came during a chunk is still in time."""

_Medians = dict[tuple[int, int], float]
"""Milliseconds by sequences and K."""


class DraftProfile(NamedTuple):
    """What was measured.

    Args:
        costs: by K and sequences, without context to speak of.
        ms_per_kv_token: what each token of context adds to each draft position.
        chunk: most tokens of background work that delay a reply no longer than it is waited for; 0 = not known.
        chunk_ms: what so many take.
    """

    costs: tuple[DraftCost, ...] = ()
    ms_per_kv_token: float = 0.0
    chunk: int = 0
    chunk_ms: float = 0.0


def measure_draft_cost(
    method: Method, budget_s: float, *, chunk: int, context_len: int = 0, clock: Callable[[], float] = time.perf_counter
) -> DraftProfile:
    """Median time of up to 5 calls, each with the commits that it follows, for numbers of sequences that are powers of two up to the most, small ones
    first: K = 1, half and all; then the other K; then chunks of background work; then as many sequences as there is time for, with a longer context.

    Each ends early when its next size would pass its share of the time or the KV blocks are used up; one sequence is always measured.
    Sequences are synthetic, and closed again.

    Args:
        budget_s: time for all of it, but for a first call.
        chunk: most tokens of background work at once.
        context_len: tokens of context to measure behind, as far as they can be computed in time and fit; 0 = none.
        clock: seconds.
    """
    bench, medians = CostBench(method, budget_s, chunk, clock), _Medians()
    ms_per_kv_token, good_chunk, good_ms = 0.0, 0, 0.0
    try:
        bench.begin()
        _measure_sizes(bench, medians)
        _measure_all_k(bench, medians)
        bench.close()
        if medians:
            good_chunk, good_ms = _measure_chunk(bench, chunk, medians[1, 1])
            ms_per_kv_token = _measure_context(bench, context_len, medians)
    finally:
        bench.close()
    costs = tuple(DraftCost(k, n, ms) for (n, k), ms in sorted(medians.items()))
    logger.info(
        "measured draft costs in %.1f s: %d numbers of sequences up to %d, %d K up to %d, %.6f ms a KV token and draft, chunks of %d tokens",
        bench.spent_s, len({cost.num_sequences for cost in costs}), max((cost.num_sequences for cost in costs), default=0),
        len({cost.num_draft_tokens for cost in costs}), bench.most, ms_per_kv_token, good_chunk,
    )  # fmt: skip
    return DraftProfile(costs, ms_per_kv_token, good_chunk, good_ms)


def _measure(bench: CostBench, medians: _Medians, num_seqs: int, ks: Sequence[int]) -> bool:
    """Whether all could be drafted for; none of them counts otherwise."""
    found = _Medians()
    for k in ks:
        bench.refresh(k)
        bench.open_up_to(num_seqs, bench.num_tokens)
        runs = bench.run(num_seqs, k)
        if runs is None:
            return False
        found[num_seqs, k] = statistics.median(runs)
    medians |= found
    return True


def _measure_sizes(bench: CostBench, medians: _Medians) -> None:
    ks = sorted({1, -(-bench.most // 2), bench.most})
    for num_seqs in _powers_of_two(bench.max_num_seqs):
        started_s = bench.spent_s
        if not _measure(bench, medians, num_seqs, ks):
            logger.info("draft costs are measured up to %d sequences: there are no KV blocks for more", num_seqs // 2)
            return
        # Twice the sequences take at most some twice the time, but for what is slow once, of which the medians know nothing. As many tokens are
        # computed in opening sequences as in a good part of the calls.
        steady_s = 2 * (1 + NUM_RUNS) * sum([medians[num_seqs, k] for k in ks]) / 1e3
        if 2 * min(bench.spent_s - started_s, steady_s) > bench.left_s(_SIZES_SHARE):
            return


def _measure_all_k(bench: CostBench, medians: _Medians) -> None:
    for num_seqs in sorted({num_seqs for num_seqs, _ in medians}):
        least_s = bench.least_s(medians[num_seqs, bench.most])
        for k in range(1, bench.most):
            if (num_seqs, k) not in medians and (least_s > bench.left_s(_GRID_SHARE) or not _measure(bench, medians, num_seqs, [k])):
                return


def _measure_chunk(bench: CostBench, most: int, smallest_call_ms: float) -> tuple[int, float]:
    """Tokens, and their milliseconds: as many as `DraftProfile.chunk` says, _MIN_CHUNK at least, and all that cost no more than these; 0 for a
    method without background work."""
    limit_ms = max(_MIN_CHUNK_MS, _CALLS_PER_CHUNK * smallest_call_ms)
    good, good_ms, num_tokens, took_s = 0, 0.0, min(most, _MIN_CHUNK), 0.0
    while num_tokens > good and 2 * took_s < bench.left_s(_CHUNK_SHARE):
        started_s = bench.spent_s
        times_ms = [ms for ms in (bench.chunk_ms(num_tokens), bench.chunk_ms(num_tokens)) if ms is not None]  # one of them may be slow once
        took_s = bench.spent_s - started_s
        if not times_ms or (good and min(times_ms) > limit_ms):
            break
        if not good:
            limit_ms = max(limit_ms, _FLAT * min(times_ms))
        good, good_ms, num_tokens = num_tokens, min(times_ms), min(2 * num_tokens, most)
    return good, good_ms


def _measure_context(bench: CostBench, context_len: int, medians: _Medians) -> float:
    """Milliseconds that each token of context adds to each draft position; 0 where that can't be told from noise. Of as many sequences as there is
    time for: with few of them attention takes its latency, which more would share, and not the bytes that it reads."""
    description, short, margin = bench.method.description, bench.num_tokens, 2 * bench.growth(bench.most)
    fitting = [n for n, k in medians if k == bench.most and 4 * bench.least_s(medians[n, k]) <= bench.left_s()]
    if not fitting:
        return 0.0
    num_seqs = max(fitting)
    least_s = bench.least_s(medians[num_seqs, bench.most])
    most_tokens = min(short + context_len, bench.longest - margin)
    if description.num_blocks:
        most_tokens = min(most_tokens, description.num_blocks // num_seqs * description.block_size - bench.most - margin)
    if most_tokens < 2 * short:
        return 0.0
    bench.open_up_to(num_seqs, short)
    base = bench.run(num_seqs, bench.most)
    first_length, took_s = bench.lengths[0], 0.0
    # Each time twice as long, until the next time would take too long.
    while base and bench.lengths[0] < most_tokens and 2 * took_s < bench.left_s() - least_s:
        started_s = bench.spent_s
        bench.extend(min(2 * max(bench.lengths), most_tokens))
        took_s = bench.spent_s - started_s
    num_more = bench.lengths[0] - short
    runs = bench.run(num_seqs, bench.most) if base and bench.lengths[0] > first_length else None
    if not base or not runs or min(runs) <= statistics.median(base):
        return 0.0
    return (statistics.median(runs) - statistics.median(base)) / (bench.most * num_seqs * num_more)


def _powers_of_two(limit: int) -> Iterator[int]:
    value = 1
    while value < limit:
        yield value
        value *= 2
    yield limit
