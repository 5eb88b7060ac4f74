"""From tokens and milliseconds a step to the schedule."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.advise.decision import Range, adaptive_gains, choose_schedule, fixed_rates, spread_sizes
from specwire.advise.drafts import DraftYield
from specwire.advise.steps import StepPoint, StepTimes
from specwire.messages import DraftCost, VerifyCost
from specwire.policy.cost import StepCost
from specwire.policy.schedule import dense_schedule, validate_schedule

TABLES = [
    ("one K for all", [[1.0, 1.5, 2.0]] * 4, 0.02, [(1, 4, 2)]),
    ("off", [[1.0, 0.9, 0.8]] * 4, 0.02, [(1, 4, 0)]),
    ("not worth it", [[1.0, 1.015, 1.01]] * 4, 0.02, [(1, 4, 0)]),
    ("worth it with a smaller gain", [[1.0, 1.015, 1.01]] * 4, 0.005, [(1, 4, 1)]),
    ("falls with the load", [[1, 1.2, 1.5], [1, 1.2, 1.5], [1, 1.3, 1.2], [1, 0.9, 0.7]], 0.02, [(1, 2, 2), (3, 3, 1), (4, 4, 0)]),
    ("near ones are merged", [[1, 1.50, 1.52], [1, 1.5, 1.49], [1, 1.40, 1.41]], 0.02, [(1, 3, 2)]),
    ("a border goes to where it is best", [[1, 1.1, 1.5], [1, 1.300, 1.301], [1, 1.301, 1.30], [1, 1.301, 1.30], [1, 1.5, 1.1]], 0.02,
     [(1, 2, 2), (3, 5, 1)]),
    ("never slower than without", [[1, 0.999, 1.0], [1, 1.2, 1.18], [1, 1.2, 1.18]], 0.02, [(1, 3, 2)]),
    ("a dear size in between", [[1, 1.2, 1.3], [1, 0.9, 0.8], [1, 1.2, 1.3]], 0.02, [(1, 1, 2), (2, 2, 0), (3, 3, 2)]),
    ("drafts between sizes for which they do little", [[1, 1.01], [1, 1.2], [1, 1.01]], 0.02, [(1, 3, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("rates", "min_gain", "schedule"), [row[1:] for row in TABLES], ids=[row[0] for row in TABLES])
def test_schedules(rates: list[list[float]], min_gain: float, schedule: list[Range]) -> None:
    assert choose_schedule(np.array(rates, dtype=np.float64), min_gain) == schedule


@given(
    st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4), min_size=n, max_size=n)),
    st.sampled_from([0.0, 0.02, 0.1, 1.0]),
)
def test_no_size_loses_more_than_the_least_gain(rows: list[list[float]], min_gain: float) -> None:
    rates = np.array(rows)
    schedule = choose_schedule(rates, min_gain)
    validate_schedule(schedule)
    table = dense_schedule(schedule, 3, len(rates))
    chosen = rates[np.arange(len(rates)), table[1:]]
    assert (chosen * (1 + min_gain) >= rates.max(axis=1) * (1 - 1e-12)).all()
    assert (chosen >= rates[:, 0]).all()
    assert [end + 1 for _, end, _ in schedule[:-1]] == [start for start, _, _ in schedule[1:]]
    assert schedule[-1][1] == len(rates)
    assert all(left[2] != right[2] for left, right in itertools.pairwise(schedule)), "equal neighbours are one range"


# 8 ms however many tokens there are up to 32, then 0.1 ms each: the shape of a GPU.
VERIFY = VerifyCost((1, 32, 1024), (8.0, 8.0, 107.2))
BLOCK = (DraftCost(1, 1, 0.5), DraftCost(7, 256, 1.0))
PLAIN = StepPoint(1, 0, 0.0, 0.0, 8.0, 0)


def times() -> StepTimes:
    """As the tables say it."""
    cost = StepCost.from_tables(VERIFY, BLOCK)
    points = [StepPoint(1, k, 1.0, float(k), float(cost_ms), 0) for k, cost_ms in ((0, 1.0), (1, 1.0))]
    trusted = StepTimes(cost, points, 0)
    return StepTimes(cost, [StepPoint(p.num_sequences, p.num_requested, p.share, p.num_drafts, trusted.table_ms(p), 0) for p in points], 0)


def of_rate(rate: float, most: int = 7) -> DraftYield:
    """All drafts are accepted with the same probability."""
    tokens = [sum(rate**i for i in range(k + 1)) for k in range(most + 1)]
    return DraftYield(tuple(tokens), (0.0, *[1.0] * most), tuple(float(k) for k in range(most + 1)))


def test_k_falls_with_the_load_and_with_the_acceptance() -> None:
    good, poor = (choose_schedule(fixed_rates(of_rate(rate), times(), 256), 0.02) for rate in (0.8, 0.4))
    for schedule in (good, poor):
        ks = [k for _, _, k in schedule]
        assert ks == sorted(ks, reverse=True)
    assert good[0][2] >= 6
    assert 4 <= good[0][1] <= 8  # from 4 x 8 tokens on, more tokens cost time
    table, poor_table = (dense_schedule(schedule, 7, 256) for schedule in (good, poor))
    assert all(k <= better for k, better in zip(poor_table, table, strict=True))
    assert poor_table[256] == 0
    assert choose_schedule(fixed_rates(of_rate(0.02), times(), 256), 0.02) == [(1, 256, 0)]


def test_rates_by_hand() -> None:
    rates = fixed_rates(of_rate(0.5, 2), times(), 16)
    cost = StepCost.from_tables(VERIFY, BLOCK)
    hop_ms = cost.hops.ms(16, 2)
    assert rates[15, 0] == pytest.approx(16 / 8.0)
    assert rates[15, 2] == pytest.approx(16 * 1.75 / (8.0 + 16 * 0.1 + cost.drafts[0].ms(2, 16) + hop_ms))


@pytest.mark.parametrize(
    ("rates", "least", "most"), [((0.8,), -0.02, 0.02), ((0.9, 0.3), 0.05, 0.5), ((0.0,), -0.02, 0.0)], ids=["uniform", "mixed", "bad"]
)
def test_adaptive_pays_where_requests_differ(rates: tuple[float, ...], least: float, most: float) -> None:
    survival = np.stack([rates[row % len(rates)] ** np.arange(1, 8) for row in range(400)])
    gains = {gain.num_sequences: gain for gain in adaptive_gains(survival, times(), [1, 16, 64, 256])}
    assert all(gain.over_fixed >= -0.02 for gain in gains.values())
    assert least <= gains[64].over_fixed <= most
    if len(rates) > 1:
        assert 0 < gains[64].drafts_per_row < 0.7 * gains[64].num_requested


def test_positions_that_differ_are_a_spread_too() -> None:
    """Rows that are good to their first draft, and rows that are good to the end: one K for all is too many for the first."""
    early, late = np.array([0.9, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0]), 0.97 ** np.arange(1, 8)
    [gain] = adaptive_gains(np.stack([early, late] * 100), times(), [48])
    assert gain.over_fixed > 0.05


def test_rows_without_drafts_have_none() -> None:
    [gain] = adaptive_gains(np.full((10, 3), -1.0), times(), [8])
    assert (gain.over_fixed, gain.num_requested, gain.drafts_per_row) == (0.0, 0, 0.0)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (5, [1, 2, 3, 4, 5]), (16, [1, 2, 3, 4, 6, 8, 12, 16])])
def test_sizes_to_look_at(largest: int, sizes: list[int]) -> None:
    assert spread_sizes(largest) == sizes
