"""What a step should take: a verifier's table alone, and the critical path of a step with drafts and hops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.messages import DraftCost, VerifyCost
from specwire.policy.cost import StepCost, StepMs, StepShape, verify_ms
from specwire.policy.curves import DraftCurve, HopCurve, HopPrior, VerifyCurve

TABLE = VerifyCost(num_tokens=(1, 2, 4, 8), step_ms=(10.0, 11.0, 15.0, 31.0), ms_per_kv_token=0.001, ms_per_row=0.5)
GRAPHS = VerifyCost(
    (1, 4, 8), (10.0, 12.0, 16.0), 0.001, 0.5, max_graph_tokens=8, max_graph_row_tokens=3, chunk_num_tokens=(4, 64), chunk_ms=(20.0, 80.0)
)
DRAFTS = (DraftCost(1, 1, 2.0), DraftCost(4, 1, 8.0), DraftCost(1, 4, 4.0), DraftCost(4, 4, 10.0))
PRIOR = HopPrior(hop_ms=0.5, host_ms=1.0, host_ms_per_row=0.25)


def lockstep_cost() -> StepCost:
    return StepCost(VerifyCurve(GRAPHS), [DraftCurve(DRAFTS)], HopCurve(PRIOR))


# --- a verifier's table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "ms"), [(1, 10.0), (2, 11.0), (3, 13.0), (4, 15.0), (6, 23.0), (8, 31.0), (16, 63.0)])
def test_sizes_between_measured_ones_are_interpolated_and_the_last_segment_goes_on(num_tokens: int, ms: float) -> None:
    assert verify_ms(TABLE, num_tokens, num_rows=1, num_kv_tokens=0) == pytest.approx(ms)


@pytest.mark.parametrize(("num_tokens", "ms"), [(1, 10.0), (3, 15.0), (4, 15.0), (5, 31.0), (6, 31.0)])
def test_a_batch_inside_the_graphs_pays_for_its_padded_size(num_tokens: int, ms: float) -> None:
    table = VerifyCost(TABLE.num_tokens, TABLE.step_ms, max_graph_tokens=4)
    assert verify_ms(table, num_tokens, num_rows=1, num_kv_tokens=0) == pytest.approx(ms)


def test_rows_and_kv_tokens_add_up() -> None:
    assert verify_ms(TABLE, 4, num_rows=3, num_kv_tokens=2000) == pytest.approx(15.0 + 2 * 0.5 + 2.0)


def test_no_table_costs_nothing() -> None:
    assert verify_ms(VerifyCost(), 100, num_rows=5, num_kv_tokens=5) == 0.0


def test_a_round_with_a_long_row_has_a_curve_of_its_own() -> None:
    assert verify_ms(GRAPHS, 8, num_rows=3, num_kv_tokens=0, longest_row=3) == pytest.approx(16.0 + 1.0)
    assert verify_ms(GRAPHS, 34, num_rows=3, num_kv_tokens=0, longest_row=4) == pytest.approx(50.0 + 1.0)
    old = VerifyCost(GRAPHS.num_tokens, GRAPHS.step_ms, max_graph_tokens=8)
    assert verify_ms(old, 8, num_rows=1, num_kv_tokens=0, longest_row=100) == 16.0


@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=8, unique=True).map(sorted),
    graph_share=st.integers(0, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_two_ways_to_read_a_table_agree(sizes: list[int], graph_share: int, seed: int) -> None:
    times = np.sort(np.random.default_rng(seed).uniform(1, 50, len(sizes))).tolist()
    limit = sizes[graph_share] if graph_share < len(sizes) else 0
    table = VerifyCost(tuple(sizes), tuple(times), 0.25, 0.5, max_graph_tokens=limit)
    tokens = np.arange(1, 700)
    expected = [verify_ms(table, int(n), 3, 7) for n in tokens]
    assert VerifyCurve(table).ms(tokens, 3, 7) == pytest.approx(np.array(expected))


# --- a step ---------------------------------------------------------------------------------------------------------


def test_run_ahead_is_the_longer_of_verifier_and_coordinator() -> None:
    cost, budgets = lockstep_cost(), np.array([0])
    assert cost.step_ms(budgets, StepShape(num_tokens=4, num_rows=4)) == pytest.approx([12.0 + 3 * 0.5])
    slow_host = StepCost(VerifyCurve(GRAPHS), (), HopCurve(HopPrior(hop_ms=3.0, host_ms=20.0, host_ms_per_row=0.5)))
    assert slow_host.step_ms(budgets, StepShape(num_tokens=4, num_rows=4)) == pytest.approx([20.0 + 2.0 + 3.0])


def test_drafting_is_the_sum_and_leaving_run_ahead_costs_a_bubble() -> None:
    cost, budgets = lockstep_cost(), np.array([0, 1, 4])
    shape = StepShape(num_tokens=4, num_rows=4, num_kv_tokens=1000, num_requested=4, num_drafting=(4,))
    hops_and_drafts = 1.0 + 4 * 0.25 + 2 * 0.5 + 10.0
    verify = np.array([12.0, 16.0, 16.0]) + 3 * 0.5 + 1.0
    assert cost.step_ms(budgets, shape) == pytest.approx(hops_and_drafts + verify)
    bubble = 1.0 + 4 * 0.25 + 0.5
    assert cost.step_ms(budgets, shape._replace(leaves_run_ahead=True)) == pytest.approx(hops_and_drafts + verify + bubble)


def test_with_one_round_in_flight_nothing_overlaps() -> None:
    cost = StepCost(VerifyCurve(GRAPHS), [DraftCurve(DRAFTS)], HopCurve(PRIOR), num_in_flight=1)
    verify, host = 12.0 + 3 * 0.5, 1.0 + 4 * 0.25
    assert cost.step_ms(np.array([0]), StepShape(num_tokens=4, num_rows=4)) == pytest.approx([verify + host + 0.5])
    drafting = StepShape(num_tokens=4, num_rows=4, num_requested=1, num_drafting=(4,), leaves_run_ahead=True)
    assert cost.step_ms(np.array([0]), drafting) == pytest.approx([verify + host + 2 * 0.5 + 4.0])


def test_no_bubble_is_longer_than_the_verifier_s_own_work() -> None:
    cost = StepCost(VerifyCurve(GRAPHS), [DraftCurve(DRAFTS)], HopCurve(HopPrior(hop_ms=100.0, host_ms=0.0, host_ms_per_row=0.0)))
    shape = StepShape(num_tokens=1, num_rows=1, num_requested=1, num_drafting=(1,), leaves_run_ahead=True)
    assert cost.step_ms(np.array([0]), shape) == pytest.approx([200.0 + 2.0 + 10.0 + 10.0])


def test_the_slowest_drafter_counts() -> None:
    slow, fast = DraftCurve((DraftCost(1, 1, 9.0),), ms_per_kv_token=0.01), DraftCurve((DraftCost(1, 1, 1.0), DraftCost(1, 8, 2.0)))
    cost = StepCost(VerifyCurve(GRAPHS), [slow, fast], HopCurve(HopPrior(0.0, 0.0, 0.0)))
    shape = StepShape(num_tokens=8, num_rows=8, num_kv_tokens=800, num_requested=1, num_drafting=(1, 7))
    base = 16.0 + 7 * 0.5 + 0.8
    assert cost.step_ms(np.array([0]), shape) == pytest.approx([base + 9.0 + 100 * 0.01])
    assert cost.step_ms(np.array([0]), shape._replace(num_drafting=(0, 8))) == pytest.approx([base + 2.0])
    assert cost.step_ms(np.array([0]), shape._replace(num_drafting=(0, 0))) == pytest.approx([base])


def test_sequences_may_be_asked_for_different_numbers_of_drafts() -> None:
    """A position costs what one more draft of so many sequences adds."""
    drafts = tuple(DraftCost(k, n, k * (1.0 + 0.5 * n)) for k in (1, 2, 4) for n in (1, 8))  # K passes of a model
    cost = StepCost(VerifyCurve(GRAPHS), [DraftCurve(drafts, ms_per_kv_token=0.001)], HopCurve(HopPrior(0.0, 0.0, 0.0)))
    shape = StepShape(num_tokens=8, num_rows=8, num_kv_tokens=800, num_requested=4, num_drafting=(8,))
    alike = cost.step_ms(np.array([0]), shape)
    assert cost.step_ms(np.array([0]), shape._replace(num_asked=(8, 8, 8, 8))) == pytest.approx(alike)
    passes = [1.0 + 0.5 * n for n in (8, 8, 2, 2)]
    kv = 0.001 * 100 * 20
    base = alike - 4 * 5.0 - 0.001 * 100 * 32
    assert cost.step_ms(np.array([0]), shape._replace(num_asked=(8, 8, 2, 2))) == pytest.approx(base + sum(passes) + kv)
    assert cost.step_ms(np.array([0]), shape._replace(num_asked=(0, 0, 0, 0))) == pytest.approx(base)
    # Of what two drafters are asked for, each has its share.
    two = StepCost(cost.verify, [DraftCurve(drafts), DraftCurve(drafts)], cost.hops)
    assert two.draft_ms(np.array([[4, 1]]), shape._replace(num_drafting=(2, 6))) == pytest.approx([(1.0 + 0.5 * 3) + (1.0 + 0.5 * 1)])


def test_a_chunk_is_priced_as_an_eager_round() -> None:
    shape = StepShape(num_tokens=34, num_rows=1, longest_row=33)
    assert lockstep_cost().step_ms(np.array([0]), shape) == pytest.approx([50.0])


@pytest.mark.parametrize(
    ("verify", "drafts", "reason"),
    [
        (VerifyCost(), DRAFTS, "the verifier has no cost table"),
        (VerifyCost((4,), (1.0,)), DRAFTS, "the verifier has no cost table of two sizes"),
        (VerifyCost((1, 2), (float("nan"), 1.0)), DRAFTS, "the verifier has no cost table"),
        (GRAPHS, (DraftCost(0, 1, 1.0), DraftCost(1, 1, float("inf"))), "a drafter has no cost table"),
    ],
)
def test_without_tables_it_says_that_it_knows_nothing(verify: VerifyCost, drafts: tuple[DraftCost, ...], reason: str) -> None:
    assert reason in StepCost.from_tables(verify, drafts).unknown


def test_with_tables_it_can_price() -> None:
    assert StepCost.from_tables(GRAPHS, DRAFTS).unknown == StepCost.from_tables(GRAPHS).unknown == ""


numbers = st.one_of(st.floats(0.01, 1e4), st.sampled_from([0.0, -1.0, float("nan"), float("inf")]))


@given(
    table=st.lists(st.tuples(st.integers(-2, 500), numbers), max_size=6),
    drafts=st.lists(st.builds(DraftCost, st.integers(-1, 9), st.integers(-1, 40), numbers), max_size=6),
    slopes=st.tuples(numbers, numbers, numbers),
    max_graph_tokens=st.integers(-1, 600),
    shape=st.builds(
        StepShape,
        st.integers(1, 300),
        st.integers(1, 64),
        st.integers(0, 10**6),
        st.integers(1, 99),
        st.integers(0, 8),
        st.just((5,)),
        st.booleans(),
        st.lists(st.integers(0, 5), max_size=8).map(lambda numbers: sorted(numbers, reverse=True)),
    ),
)
def test_costs_are_positive_numbers_that_never_fall_with_the_budget(
    table: list[tuple[int, float]], drafts: list[DraftCost], slopes: tuple[float, float, float], max_graph_tokens: int, shape: StepShape
) -> None:
    sizes, times = zip(*table, strict=True) if table else ((), ())
    verify = VerifyCost(sizes, times, slopes[0], slopes[1], max_graph_tokens, 4, sizes, times)
    cost = StepCost(VerifyCurve(verify), [DraftCurve(drafts, slopes[2])])
    if cost.unknown:
        return
    ms = cost.step_ms(np.arange(200), shape)
    assert np.isfinite(ms).all()
    assert (ms > 0).all()
    assert (np.diff(ms) >= 0).all()


# --- correction -----------------------------------------------------------------------------------------------------


def test_factors_follow_when_everything_is_dearer() -> None:
    cost, truth = lockstep_cost(), lockstep_cost()
    rng, errors = np.random.default_rng(3), []
    for step in range(200):
        k, budget = step % 5, int(rng.integers(0, 5)) if step % 5 else 0
        shape = StepShape(num_tokens=4, num_rows=4, num_kv_tokens=4000, num_requested=k, num_drafting=(4,))
        expected = float(truth.step_ms(np.array([budget]), shape)[0]) * 1.3
        errors.append(abs(float(cost.step_ms(np.array([budget]), shape)[0]) / expected - 1))
        noise = 1.3 * rng.lognormal(0.0, 0.02)
        parts = StepMs(
            verify_ms=float(truth.verify.table_ms(np.array([4 + budget]), 4, 4000)[0]) * noise,
            draft_ms=truth.drafts[0].table_ms(k, 4, 4000) * noise,
            hop_ms=truth.hops.table_ms(4, 2 if k else 1) * noise,
        )
        cost.observe(budget, shape, parts)
    assert errors[0] > 0.2
    assert max(errors[100:]) < 0.05
    for curve in (cost.verify, cost.drafts[0], cost.hops):
        assert curve.correction.factor == pytest.approx(1.3, rel=0.03)


def test_what_was_not_measured_moves_nothing() -> None:
    cost = lockstep_cost()
    cost.observe(2, StepShape(4, 4, num_requested=4, num_drafting=(4,)), StepMs(0.0, float("nan"), float("inf")))
    assert {curve.correction.factor for curve in (cost.verify, cost.drafts[0], cost.hops)} == {1.0}
    assert len(cost.verify.correction.errors) == 0


def test_a_curve_is_corrected_for_all_that_share_it() -> None:
    drafter = DraftCurve(DRAFTS)
    lanes = [StepCost(VerifyCurve(GRAPHS), [drafter]) for _ in range(2)]
    shape = StepShape(4, 4, num_requested=4, num_drafting=(4,))
    before = float(lanes[1].step_ms(np.array([0]), shape)[0])
    for _ in range(100):
        lanes[0].observe(0, shape, StepMs(0.0, 20.0, 0.0))
    assert float(lanes[1].step_ms(np.array([0]), shape)[0]) - before == pytest.approx(10.0, rel=0.05)
