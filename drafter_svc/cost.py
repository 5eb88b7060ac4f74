"""What a draft call costs: a short measurement that seeds the coordinator's waiting times and budgets."""

import logging
import statistics
import time
from collections.abc import Iterator

from specwire.messages import DraftCost, DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams

from .method import Ask, Method

logger = logging.getLogger(__name__)

_NUM_TOKENS = 32
_NUM_RUNS = 3


def measure_draft_cost(method: Method, budget_s: float) -> tuple[DraftCost, ...]:
    """Median time of `propose` by K (1, half, all) and number of sequences (powers of two up to the most), small ones first.

    Ends early when the next size would pass `budget_s` or the KV blocks are used up; one sequence is always measured. Sequences are
    synthetic, 32 tokens long, and closed again.
    """
    description = method.description
    most = description.max_num_draft_tokens
    num_tokens = max(1, min(_NUM_TOKENS, description.max_model_len - most))
    deadline = time.perf_counter() + budget_s
    costs: list[DraftCost] = []
    num_open = 0
    try:
        for num_seqs in _powers_of_two(description.max_num_seqs):
            started = time.perf_counter()
            for seq_id in range(num_open, num_seqs):
                method.open(seq_id, _synthetic_open(seq_id, num_tokens, description.vocab_size or 1 << 15))
                num_open += 1
            while method.catch_up(num_seqs * num_tokens):
                pass
            for k in sorted({1, -(-most // 2), most}):
                draft_ms = _median_ms(method, num_seqs, k)
                if draft_ms is None:
                    logger.info("draft costs are measured up to %d sequences: there are no KV blocks for more", num_seqs // 2)
                    return tuple(costs)
                costs.append(DraftCost(k, num_seqs, draft_ms))
            # Twice the sequences take at most some twice the time.
            now = time.perf_counter()
            if now + 2 * (now - started) > deadline:
                break
    finally:
        for seq_id in range(num_open):
            method.close(seq_id)
    return tuple(costs)


def _median_ms(method: Method, num_seqs: int, num_draft_tokens: int) -> float | None:
    """None where a sequence could not be drafted for."""
    asks = [Ask(seq_id, num_draft_tokens) for seq_id in range(num_seqs)]
    runs = []
    # The first call has more tokens to compute, and warms up.
    for _ in range(1 + _NUM_RUNS):
        started = time.perf_counter()
        drafts = method.propose(asks)
        runs.append((time.perf_counter() - started) * 1e3)
        if any(answer.status is not RowStatus.OK for answer in drafts):
            return None
    return statistics.median(runs[1:])


def _synthetic_open(seq_id: int, num_tokens: int, vocab_size: int) -> DraftOpen:
    # Different in every sequence, so that a prefix cache does not make them one.
    token_ids = [(seq_id * 7919 + index * 104_729) % vocab_size for index in range(num_tokens)]
    return DraftOpen(seq_id, 0, token_ids, num_tokens, SamplingParams(), noise_key=seq_id)


def _powers_of_two(limit: int) -> Iterator[int]:
    value = 1
    while value < limit:
        yield value
        value *= 2
    yield limit
