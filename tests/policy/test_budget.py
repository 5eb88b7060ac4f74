"""The confidence budget: golden cases, prefixes, and the best of all choices on small ones.

Golden cases are those of vLLM's adaptive verification that make sense here. Not among them: the layout of placeholders before its device has
chosen (the choice is made where the rows are laid out), confidences of the step before last (they are this step's), new sequences counted as
fully confident (they count by their own scores), and an order of equal survivals that nothing fixes (by position, then row).
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.policy.budget import Budget, choose_budget, survivals

NAN = float("nan")
FLAT = [1.0] * 9


def choose(confidences: list[list[float]], num_sampling: int, cost_ms: list[float], num_offered: list[int] | None = None) -> Budget:
    matrix = np.array(confidences, dtype=np.float64)
    offered = np.array(num_offered if num_offered is not None else [matrix.shape[1]] * len(matrix))
    return choose_budget(survivals(matrix, offered), num_sampling, np.array(cost_ms))


@pytest.mark.parametrize(
    ("confidences", "num_sampling", "cost_ms", "num_kept"),
    [
        ([[0.1, 0.1], [0.9, 0.9]], 2, [1, 1, 100, 100, 100], [0, 1]),
        ([[1, 1], [1, 1]], 2, FLAT, [2, 2]),
        ([[0, 0], [0, 0]], 2, FLAT, [0, 0]),
        ([[0.9, 0.8, 0.5], [0.6, 0.5, 0.4]], 2, [1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1], [3, 2]),
        ([[0.9, 0.9], [0.9, 0.9]], 2, [1, 1, 9, 9, 9], [1, 0]),  # beside a chunk of 40 tokens, before a jump
        ([[0.9, 0.9], [0.9, 0.9]], 2, [1, 1], [1, 0]),  # no more than one slot may be verified
        ([[0.9, 0.9], [0.9, 0.9], [0.9, 0.9]], 3, [1], [0, 0, 0]),  # none may
    ],
)
def test_golden_cases(confidences: list[list[float]], num_sampling: int, cost_ms: list[float], num_kept: list[int]) -> None:
    budget = choose(confidences, num_sampling, cost_ms)
    assert budget.num_kept.tolist() == num_kept
    assert budget.num_tokens == sum(num_kept)
    assert budget.cost_ms == cost_ms[budget.num_tokens]


def test_golden_ratios() -> None:
    cost = [1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1]
    for most, ratio in enumerate([1.3333, 1.8125, 2.1294, 2.3444, 2.4105, 2.44, 2.44]):
        budget = choose([[0.9, 0.8, 0.5], [0.6, 0.5, 0.4]], 2, cost[: most + 1])
        assert budget.expected_tokens / budget.cost_ms == pytest.approx(ratio, abs=1e-4)


@pytest.mark.parametrize(
    ("confidences", "num_offered", "num_kept"),
    [
        ([[0.5, NAN, 1], [NAN, 1, 1]], [3, 3], [1, 0]),  # NaN is 0, and so is all behind it
        ([[2, 1, 1], [-1, 1, 1]], [3, 3], [3, 0]),  # clipped to [0, 1]
        ([[float("inf"), 1, 1], [float("-inf"), 1, 1]], [3, 3], [3, 0]),
        ([[1, 1, 1], [1, 1, 1]], [1, 2], [1, 2]),  # no more than there are drafts
        ([[1, 1, 1], [1, 1, 1]], [0, 0], [0, 0]),
    ],
)
def test_confidences_that_are_none(confidences: list[list[float]], num_offered: list[int], num_kept: list[int]) -> None:
    assert choose(confidences, 2, FLAT, num_offered).num_kept.tolist() == num_kept


@pytest.mark.parametrize(("most", "num_kept"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (5, [2, 2, 1])])
def test_equal_survivals_go_by_position_then_row(most: int, num_kept: list[int]) -> None:
    """Equal along a row, too, where confidences are 1."""
    assert choose([[1, 1], [1, 1], [1, 1]], 3, [1.0] * (most + 1)).num_kept.tolist() == num_kept


def test_the_best_budget_need_not_be_the_first_local_one() -> None:
    """A step that costs more, once, and then holds many more slots."""
    jump = [1.0, 1.9] + [2.0] * 7
    budget = choose([[0.95] * 4, [0.95] * 4], 2, jump)
    assert budget.num_tokens == 8, "a search that stops at the first drop, from 0 to 1 slot, stays at 0"
    assert choose([[0.3] * 4, [0.3] * 4], 2, jump).num_tokens == 0


@pytest.mark.parametrize(("tokens_per_ms", "num_tokens"), [(0.0, 4), (0.3, 4), (0.45, 3), (0.9, 2), (2.0, 1), (3.0, 0)])
def test_where_steps_differ_a_slot_must_be_worth_its_time(tokens_per_ms: float, num_tokens: int) -> None:
    """Of survivals .9, .9, .5, .4 at one millisecond each; the first one costs half."""
    survival = survivals(np.array([[0.9, 0.5], [0.9, 0.4]]) / [[1, 0.9], [1, 0.9]], np.array([2, 2]))
    assert choose_budget(survival, 2, np.array([9.0, 9.4, 10.2, 11.0, 12.0]), tokens_per_ms).num_tokens == num_tokens


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_at_its_own_best_rate_both_rules_agree(num_rows: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    survival = survivals(rng.random((num_rows, k)), np.full(num_rows, k))
    cost_ms = 1 + np.cumsum(rng.random(num_rows * k + 1))
    budget = choose_budget(survival, num_rows, cost_ms)
    other = choose_budget(survival, num_rows, cost_ms, budget.expected_tokens / budget.cost_ms)
    assert other.expected_tokens / other.cost_ms == pytest.approx(budget.expected_tokens / budget.cost_ms)


@pytest.mark.parametrize(
    ("num_sampling", "tokens_per_ms", "loss"),
    [
        (2, None, 1 - (2 + 0.9 + 0.81 + 0.1) / 8 * 5 / (2 + 0.9)),  # the best is one slot: 0.58 tokens a millisecond
        (2, 0.5, ((2.9 - 0.5 * 5) - (3.81 - 0.5 * 8)) / 2.9),
    ],
)
def test_what_another_budget_loses(num_sampling: int, tokens_per_ms: float | None, loss: float) -> None:
    survival, costs = np.array([[0.9, 0.81, 0.1]]), np.array([4.0, 5.0, 6.9, 8.0])
    best = choose_budget(survival, num_sampling, costs, tokens_per_ms)
    assert best.num_tokens == 1
    whole = Budget(np.array([3]), 3, num_sampling + 1.81, 8.0)
    assert whole.loss_beside(best, tokens_per_ms) == pytest.approx(loss)
    assert best.loss_beside(best, tokens_per_ms) == pytest.approx(0.0)


def test_no_rows() -> None:
    assert choose_budget(np.empty((0, 3)), 0, np.array([1.0])).num_kept.tolist() == []
    assert choose_budget(np.empty((2, 0)), 2, np.array([1.0, 1.0])).num_kept.tolist() == [0, 0]


CONFIDENCES = st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.9, 1.0, NAN, 1.5])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[float]]:
    num_rows, k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    confidences = draw(st.lists(st.lists(CONFIDENCES, min_size=k, max_size=k), min_size=num_rows, max_size=num_rows))
    num_offered = draw(st.lists(st.integers(0, k), min_size=num_rows, max_size=num_rows))
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 2.0]), min_size=1, max_size=num_rows * k + 1))
    return confidences, num_offered, list(1 + np.cumsum(rises))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_choice_of_prefixes_is_better(case: tuple[list[list[float]], list[int], list[float]]) -> None:
    confidences, num_offered, cost_ms = case
    survival = survivals(np.array(confidences), np.array(num_offered))
    num_rows = len(confidences)
    budget = choose_budget(survival, num_rows, np.array(cost_ms))
    assert (budget.num_kept <= num_offered).all()
    assert budget.num_tokens == budget.num_kept.sum() < len(cost_ms)
    gain = sum(float(survival[row, :kept].sum()) for row, kept in enumerate(budget.num_kept))
    assert budget.expected_tokens == pytest.approx(num_rows + gain)
    reached = budget.expected_tokens / budget.cost_ms
    for prefixes in itertools.product(*(range(offered + 1) for offered in num_offered)):
        if sum(prefixes) < len(cost_ms):
            tokens = num_rows + sum(float(survival[row, :kept].sum()) for row, kept in enumerate(prefixes))
            assert tokens / cost_ms[sum(prefixes)] <= reached * (1 + 1e-12)
            if sum(prefixes) < budget.num_tokens:
                assert tokens / cost_ms[sum(prefixes)] < reached, "a smaller budget is as good"


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_what_is_kept_is_the_best_there_is(num_rows: int, k: int, seed: int) -> None:
    """Every kept slot is at least as likely as every one that is not; with rounded confidences many are equal."""
    rng = np.random.default_rng(seed)
    survival = survivals(rng.integers(0, 5, (num_rows, k)) / 4, rng.integers(0, k + 1, num_rows))
    cost_ms = 1 + np.cumsum(rng.random(num_rows * k + 1) * rng.choice([0.01, 0.3]))
    budget = choose_budget(survival, num_rows, cost_ms)
    is_kept = np.arange(k) < budget.num_kept[:, None]
    assert survival[is_kept].min(initial=1.0) >= survival[~is_kept].max(initial=0.0)
    assert (survival[is_kept] >= 0).all(), "a slot without a draft was kept"
