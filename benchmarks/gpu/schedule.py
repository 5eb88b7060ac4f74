"""Batch-size schedules: from the services' own cost tables alone, and from steps that were measured, as `specwire advise` makes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specwire.advise import decision
from specwire.advise.drafts import DraftYield
from specwire.advise.steps import StepPoint, StepTimes
from specwire.policy.cost import StepCost, StepShape

Schedule = tuple[tuple[int, int, int], ...]
_MIN_GAIN = 0.02
"""As `specwire advise` has it."""


def advised_schedule(cost: StepCost, survivals: Sequence[float], steps: Sequence[StepPoint], max_num_seqs: int, context_len: int) -> Schedule:
    """The schedule that `specwire advise` makes of steps that were measured.

    Args:
        cost: by the services' tables, which the steps correct.
        survivals: probability that the first i drafts are all accepted, for i = 1..K_max.
        steps: some with K = 0 and some with another one.
        context_len: mean tokens of a sequence.
    """
    numbers = range(len(survivals) + 1)
    drafts = DraftYield(
        tokens=tuple(1 + sum(survivals[:k]) for k in numbers), share=tuple(float(k > 0) for k in numbers), drafts=tuple(map(float, numbers))
    )
    times = StepTimes(cost, steps, context_len)
    return tuple(decision.choose_schedule(decision.fixed_rates(drafts, times, max_num_seqs), _MIN_GAIN))


def measured_steps(rows: Sequence[Mapping[str, Any]], context_len: int) -> list[StepPoint]:
    """The steps behind tokens a second of `c` sequences with `k` drafts and without any (`plain`): what a step takes if all that a batch takes is
    shared out among its steps."""
    found = []
    for row in rows:
        for k, one in ((0, row["plain"]), (row["k"], row)):
            step_ms = 1000 * row["c"] * one["acceptance_length"] / one["tok_s"]
            found.append(StepPoint(row["c"], k, float(k > 0), float(k), step_ms, context_len))
    return found


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
