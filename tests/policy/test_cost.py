"""What a verify step should take, by a measured table."""

import pytest

from specwire.messages import VerifyCost
from specwire.policy.cost import verify_ms

TABLE = VerifyCost(num_tokens=(1, 2, 4, 8), step_ms=(10.0, 11.0, 15.0, 31.0), ms_per_kv_token=0.001, ms_per_row=0.5)


@pytest.mark.parametrize(("num_tokens", "ms"), [(1, 10.0), (2, 11.0), (3, 13.0), (4, 15.0), (6, 23.0), (8, 31.0), (16, 62.0)])
def test_sizes_between_measured_ones_are_interpolated(num_tokens: int, ms: float) -> None:
    assert verify_ms(TABLE, num_tokens, num_rows=1, num_kv_tokens=0) == pytest.approx(ms)


@pytest.mark.parametrize(("num_tokens", "ms"), [(1, 10.0), (3, 15.0), (4, 15.0), (6, 23.0)])
def test_a_batch_inside_the_graphs_pays_for_its_padded_size(num_tokens: int, ms: float) -> None:
    table = VerifyCost(TABLE.num_tokens, TABLE.step_ms, max_graph_tokens=4)
    assert verify_ms(table, num_tokens, num_rows=1, num_kv_tokens=0) == pytest.approx(ms)


def test_rows_and_kv_tokens_add_up() -> None:
    assert verify_ms(TABLE, 4, num_rows=3, num_kv_tokens=2000) == pytest.approx(15.0 + 2 * 0.5 + 2.0)


def test_no_table_costs_nothing() -> None:
    assert verify_ms(VerifyCost(), 100, num_rows=5, num_kv_tokens=5) == 0.0
