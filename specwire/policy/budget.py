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

    def loss_beside(self, best: "Budget", tokens_per_ms: float | None = None) -> float:
        """Share of the best one's value that this one loses; tokens_per_ms: see `choose_budget`."""
        if tokens_per_ms is None:
            return 1.0 - self.expected_tokens * best.cost_ms / (self.cost_ms * best.expected_tokens)
        lost = best.expected_tokens - self.expected_tokens + tokens_per_ms * (self.cost_ms - best.cost_ms)
        return lost / best.expected_tokens


def survivals(confidences: Floats, num_offered: Ints) -> Floats:
    """Running products of the confidences [R, K], each clipped to [0, 1], NaN as 0; -1 from a row's num_offered-th [R] position on."""
    clean = np.fmax(confidences, 0.0)  # of NaN and 0 it takes the 0
    np.minimum(clean, 1.0, out=clean)
    for position in range(1, clean.shape[1]):  # K steps over R: faster than cumprod along the short axis
        clean[:, position] *= clean[:, position - 1]
    clean[np.arange(clean.shape[1]) >= num_offered[:, None]] = -1.0
    return clean


def survivals_of_probabilities(confidences: Floats, num_offered: Ints, num_drafts: int) -> Floats:
    """The same of numbers in [0, 1]; num_drafts: the sum of num_offered."""
    products: Floats = np.multiply.accumulate(confidences, axis=1)
    if num_drafts < products.size:
        products[np.arange(products.shape[1]) >= num_offered[:, None]] = -1.0
    return products


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
    values = np.sort(survival, axis=None)[::-1]  # what is no draft comes last
    if len(values) and values[-1] < 0.0:
        values = values[: np.count_nonzero(values >= 0.0)]
    values = values[: len(cost_ms) - 1]
    expected, costs = np.cumsum(values), cost_ms[1 : 1 + len(values)]
    expected += num_sampling
    none, ms = float(num_sampling), float(cost_ms[0])
    if not len(values):
        return Budget(np.zeros(len(survival), dtype=np.int64), 0, none, ms)
    worth = expected / costs if tokens_per_ms is None else expected - tokens_per_ms * costs
    best = int(worth.argmax())
    if worth[best] <= (none / ms if tokens_per_ms is None else none - tokens_per_ms * ms):
        return Budget(np.zeros(len(survival), dtype=np.int64), 0, none, ms)
    return Budget(_take_best(survival, values[best], best + 1), best + 1, float(expected[best]), float(costs[best]))


def _take_best(survival: Floats, least: float, num_tokens: int) -> Ints:
    """[R] how many of a row's slots are among the best `num_tokens`, whose smallest survival is `least`."""
    kept: Ints = np.add.reduce(np.ascontiguousarray((survival >= least).T), axis=0, dtype=np.int64)  # faster than along the short axis
    num_over = int(kept.sum()) - num_tokens
    if num_over > 0:  # the last ones that are equally good go: by position, then row
        ties = np.flatnonzero(survival.T.ravel() == least)[-num_over:]
        kept -= np.bincount(ties % len(survival), minlength=len(survival))
    return kept
