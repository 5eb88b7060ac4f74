"""The confidence budget: how many draft slots of a step are worth verifying, and which (docs/design.md section 4).

All draft slots of all sequences compete for the same step. With survivals s (the running product of a sequence's confidences) the step is
expected to emit N + (sum of the B largest s) tokens in cost(B) milliseconds, and B* is the B with the most tokens a millisecond.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Budget:
    """A step's choice.

    Args:
        num_kept: [R] drafts that each row keeps: a prefix of what it was offered.
        num_tokens: B, their sum.
        expected_tokens: tokens that the step should emit.
        cost_ms: what it should take.
    """

    num_kept: Ints
    num_tokens: int
    expected_tokens: float
    cost_ms: float


def survivals(confidences: Floats, num_offered: Ints) -> Floats:
    """Running products of the confidences [R, K], each clipped to [0, 1], NaN as 0; -1 from a row's num_offered-th [R] position on."""
    clean = np.fmax(confidences, 0.0)  # of NaN and 0 it takes the 0
    np.minimum(clean, 1.0, out=clean)
    for position in range(1, clean.shape[1]):  # K steps over R: faster than cumprod along the short axis
        clean[:, position] *= clean[:, position - 1]
    clean[np.arange(clean.shape[1]) >= num_offered[:, None]] = -1.0
    return clean


def choose_budget(survival: Floats, num_sampling: int, cost_ms: Floats, tokens_per_ms: float | None = None) -> Budget:
    """B* = argmax over B of (num_sampling + sum of the B largest survivals) / cost_ms[B]; the smallest B of equal ones.

    Equal survivals are ordered by position, then row. A row's survivals never rise, so the B best are a prefix of every row.

    Args:
        survival: [R, K] as `survivals` gives them; negative where there is no draft.
        num_sampling: sequences that emit a token in this step whatever is drafted.
        cost_ms: [B_max + 1] positive times of the step with 0..B_max draft tokens; slots beyond B_max are not verified.
        tokens_per_ms: what a millisecond is worth elsewhere, where steps differ: then the most tokens beyond that, tokens - tokens_per_ms x cost.
            With the rate of this step itself both are the same.
    """
    assert len(cost_ms) > 0, "cost_ms has no entry, not even for a step without drafts"
    values = survival[survival >= 0.0]
    values.sort()
    values = values[::-1][: len(cost_ms) - 1]
    expected = np.empty(len(values) + 1)
    expected[0] = num_sampling
    np.cumsum(values, out=expected[1:])
    expected[1:] += num_sampling
    costs = cost_ms[: len(expected)]
    best = int(np.argmax(expected / costs if tokens_per_ms is None else expected - tokens_per_ms * costs))
    kept = _take_best(survival, values[best - 1] if best else np.inf, best)
    return Budget(kept, best, float(expected[best]), float(cost_ms[best]))


def _take_best(survival: Floats, least: float, num_tokens: int) -> Ints:
    """[R] how many of a row's slots are among the best `num_tokens`, whose smallest survival is `least`."""
    kept = np.add.reduce(np.ascontiguousarray((survival > least).T), axis=0, dtype=np.int64)  # faster than along the short axis
    num_ties = num_tokens - int(kept.sum())
    if num_ties > 0:
        ties = np.flatnonzero(survival.T.ravel() == least)[:num_ties]  # by position, then row
        kept += np.bincount(ties % len(survival), minlength=len(survival))
    return kept
