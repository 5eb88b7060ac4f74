"""Measured tables as dense curves, and the slow factor."""

import math

import numpy as np
import pytest

from specwire.messages import DraftCost, VerifyCost
from specwire.policy.correction import Correction
from specwire.policy.curves import DraftCurve, HopCurve, HopPrior, VerifyCurve, dense_ms


@pytest.mark.parametrize(
    ("points", "padded_up_to", "first", "expected"),
    [
        ({2: 10, 4: 9, 8: 20, 12: 40, 16: 60}, 8, 0, [10] * 5 + [20] * 4 + [40] * 4 + [45, 50, 55, 60, 65, 70, 75, 80]),
        ({2: 10, 4: 12}, 4, 0, [10, 10, 10, 12, 12, 13, 14, 15, 16]),
        ({1: 1, 4: 2}, 8, 0, [1, 1, 2, 2, 2, 2 + 1 / 3, 2 + 2 / 3]),
        ({4: 8}, 0, 3, [8, 8, 10, 12]),
        ({1: 5, 2: 5}, 2, 1, [5, 5, 5]),
    ],
)
def test_dense_tables(points: dict[int, float], padded_up_to: int, first: int, expected: list[float]) -> None:
    dense = dense_ms(list(points), list(points.values()), padded_up_to, first + len(expected))
    assert dense[first:] == pytest.approx(expected)


def test_a_verify_curve_goes_on_however_far_it_is_asked() -> None:
    curve = VerifyCurve(VerifyCost((2, 4), (10.0, 12.0), max_graph_tokens=4))
    assert curve.ms(np.array([3, 4]), 1, 0) == pytest.approx([12.0, 12.0])
    assert curve.ms(np.array([5, 10_000]), 1, 0) == pytest.approx([13.0, 10_008.0])
    assert curve.ms(np.array([], dtype=np.int64), 1, 0).shape == (0,)


def test_rounds_with_long_chunks_have_factors_of_their_own_where_they_have_a_table() -> None:
    curve = VerifyCurve(VerifyCost((1, 64), (4.0, 8.0), max_graph_row_tokens=8, chunk_num_tokens=(64, 512), chunk_ms=(10.0, 40.0)))
    for _ in range(50):
        curve.correction_of(100).observe(64, 10.0, 5.0)
    assert curve.ms(np.array([64]), 1, 0, longest_row=64) == pytest.approx([5.0], rel=0.02)
    assert curve.ms(np.array([64]), 8, 0, longest_row=8) == pytest.approx([8.0])
    alike = VerifyCurve(VerifyCost((1, 64), (4.0, 8.0)))
    assert alike.correction_of(100) is alike.correction_of(1)


def test_a_draft_curve_is_interpolated_over_k_and_sequences() -> None:
    curve = DraftCurve([DraftCost(1, 1, 2.0), DraftCost(5, 1, 10.0), DraftCost(1, 4, 5.0), DraftCost(5, 4, 13.0), DraftCost(3, 4, 8.0)])
    assert [curve.ms(k, 1) for k in range(7)] == pytest.approx([0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
    assert [curve.ms(k, 4) for k in range(1, 6)] == pytest.approx([5.0, 6.5, 8.0, 10.5, 13.0])
    assert [curve.ms(5, n) for n in (0, 1, 2, 3, 4, 5, 40)] == pytest.approx([0.0, 10.0, 11.0, 12.0, 13.0, 14.0, 49.0])
    assert curve.ms(3, 2) == pytest.approx(6.0 + 2.0 / 3)


def test_context_costs_each_draft_position() -> None:
    curve = DraftCurve([DraftCost(1, 1, 2.0), DraftCost(4, 1, 8.0)], ms_per_kv_token=0.001)
    assert curve.ms(4, 1, num_kv_tokens=1000) == pytest.approx(8.0 + 4 * 1.0)
    assert curve.ms(0, 1, num_kv_tokens=1000) == 0.0


def test_noise_in_a_draft_table_makes_no_call_cheaper_that_does_more() -> None:
    curve = DraftCurve([DraftCost(1, 1, 4.0), DraftCost(2, 1, 3.0), DraftCost(1, 2, 2.0), DraftCost(2, 2, 6.0)])
    table = np.array([[curve.ms(k, n) for n in range(1, 5)] for k in range(1, 5)])
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()


def test_hops() -> None:
    curve = HopCurve(HopPrior(hop_ms=0.5, host_ms=1.0, host_ms_per_row=0.25))
    assert (curve.ms(4, 1), curve.ms(4, 2)) == (2.5, 3.0)


# --- the factor -----------------------------------------------------------------------------------------------------


def test_the_factor_moves_slowly_and_arrives() -> None:
    correction = Correction()
    correction.observe(10.0, 13.0)
    assert 1.0 < correction.factor < 1.02
    for _ in range(100):
        correction.observe(10.0, 13.0)
    assert correction.factor == pytest.approx(1.3, rel=0.01)


def test_one_hiccup_bends_nothing() -> None:
    correction = Correction()
    correction.observe(10.0, 10_000.0)
    assert correction.factor < 1.04


def test_the_factor_has_limits() -> None:
    high, low = Correction(), Correction()
    for _ in range(1000):
        high.observe(1.0, 1e9)
        low.observe(1e9, 1.0)
    assert high.factor == pytest.approx(8.0)
    assert low.factor == pytest.approx(1 / 8)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_numbers_that_can_t_be_change_nothing(wrong: float) -> None:
    correction = Correction()
    correction.observe(wrong, 1.0)
    correction.observe(1.0, wrong)
    assert (correction.factor, len(correction.errors), correction.errors.median) == (1.0, 0, 0.0)


def test_errors_are_those_of_the_last_predictions() -> None:
    correction = Correction()
    correction.observe(10.0, 20.0)
    assert correction.errors.median == 0.5
    for _ in range(600):
        correction.observe(10.0, 20.0)
    assert len(correction.errors) == 256
    assert correction.errors.median < 0.01
