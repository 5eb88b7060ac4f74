"""A batch-size schedule from the services' own cost tables: for every number of sequences the K with the most tokens a second."""

from collections.abc import Sequence

import numpy as np

from specwire.policy.cost import StepCost, StepShape

Schedule = tuple[tuple[int, int, int], ...]


def choose_schedule(cost: StepCost, rates: Sequence[float], max_num_seqs: int, num_context_tokens: int) -> Schedule:
    """Ranges [first, last, K] over 1 to max_num_seqs.

    Args:
        cost: of a step.
        rates: probability that the first i drafts are all accepted, for i = 1..K_max.
        num_context_tokens: of a sequence.
    """
    ranges: list[tuple[int, int, int]] = []
    for num_seqs in range(1, max_num_seqs + 1):
        k = best_k(cost, rates, num_seqs, num_context_tokens)
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], num_seqs, k)
        else:
            ranges.append((num_seqs, num_seqs, k))
    return tuple(ranges)


def best_k(cost: StepCost, rates: Sequence[float], num_seqs: int, num_context_tokens: int) -> int:
    """Where a millisecond gives most tokens; the smallest K at a tie."""
    speeds = [(1 + sum(rates[:k])) / predicted_ms(cost, k, num_seqs, num_context_tokens) for k in range(len(rates) + 1)]
    return int(np.argmax(speeds))


def predicted_ms(cost: StepCost, k: int, num_seqs: int, num_context_tokens: int) -> float:
    """Of a step in which all sequences have k drafts."""
    shape = StepShape(num_seqs, num_seqs, num_seqs * num_context_tokens, num_requested=k, num_drafting=(num_seqs,))
    return float(cost.step_ms(np.array([k * num_seqs]), shape)[0])
