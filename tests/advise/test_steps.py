"""Times of steps: the services' tables, corrected by measured steps."""

import numpy as np
import pytest

from specwire.advise.steps import StepPoint, StepTimes, cost_of_status
from specwire.messages import CoordinatorStatus, DraftCost, DrafterStatus, LaneStatus, VerifyCost
from specwire.policy.cost import StepCost

TABLE = VerifyCost((1, 64, 512), (10.0, 16.0, 60.0), ms_per_row=0.01, ms_per_kv_token=1e-5)
DRAFTS = (DraftCost(1, 1, 1.0), DraftCost(4, 1, 3.0), DraftCost(1, 64, 2.0), DraftCost(4, 64, 5.0))
NONE = np.array([0])


def cost() -> StepCost:
    return StepCost.from_tables(TABLE, DRAFTS)


def point(num_sequences: int, k: int, ms: float, *, share: float = 1.0) -> StepPoint:
    return StepPoint(num_sequences, k, share if k else 0.0, float(k), ms, 200)


POINTS = (point(1, 0, 14.0), point(1, 1, 20.0), point(1, 4, 21.0), point(16, 0, 15.0), point(16, 1, 26.0), point(16, 4, 40.0))


def test_measured_steps_are_what_was_measured() -> None:
    times = StepTimes(cost(), POINTS, 200)
    assert times.unknown == ""
    assert times.largest_measured == 16
    for each in POINTS:
        found = times.ms(each.num_sequences, each.num_requested, np.array([each.num_sequences * each.num_requested]))
        assert found == pytest.approx([each.step_ms])
        assert times.mean_ms(each.num_sequences, each.num_requested, each.share, each.num_drafts) == pytest.approx(each.step_ms)


def test_between_and_beyond_points_the_tables_give_the_shape() -> None:
    times, table = StepTimes(cost(), POINTS, 200), StepTimes(cost(), [point(1, 0, 1.0), point(1, 1, 1.0)], 200)
    ratio = times.ms(64, 4, np.array([256])) / times.ms(64, 4, np.array([0]))
    assert ratio == pytest.approx(table.ms(64, 4, np.array([256])) / table.ms(64, 4, np.array([0])))
    # Between 1 and 16 sequences and K = 1 and 4, the correction is in between.
    low, high = sorted(each.step_ms / times.table_ms(each) for each in POINTS if each.num_requested)[:: len(POINTS) - 3]
    middle = times.ms(4, 2, np.array([8]))[0] / times.table_ms(StepPoint(4, 2, 1.0, 2.0, 1.0, 200))
    assert low < middle < high


def test_a_size_without_drafted_steps_has_the_correction_of_plain_ones() -> None:
    """The table is 2 times too slow at one sequence, and right at 16; nothing was drafted at one sequence. With drafts it is too slow, too."""
    plain = StepTimes(cost(), [point(1, 0, 1.0), point(1, 1, 1.0)], 200)
    times = StepTimes(
        cost(), [point(1, 0, plain.table_ms(point(1, 0, 1.0)) / 2), *(point(16, k, plain.table_ms(point(16, k, 1.0))) for k in (0, 1, 4))], 200
    )
    assert times.ms(1, 4, np.array([4]))[0] == pytest.approx(plain.table_ms(point(1, 4, 1.0)) / 2)


def test_sequences_that_rarely_have_drafts_cost_what_their_steps_do() -> None:
    """4 drafts in one of 4 steps, on a table with a jump behind one token: the mean of both, not the cost of one draft."""
    jump = StepCost.from_tables(VerifyCost((1, 8), (10.0, 30.0), max_graph_tokens=8), DRAFTS)
    times = StepTimes(jump, [point(1, 0, 10.0), StepPoint(1, 4, 0.25, 4.0, 20.0, 0)], 0)
    plain, drafted = (float(times.ms(1, 4, np.array([number]))[0]) for number in (0, 4))
    assert drafted > plain
    assert times.mean_ms(1, 4, 0.25, 4.0) == pytest.approx(20.0) == pytest.approx(0.75 * plain + 0.25 * drafted)


@pytest.mark.parametrize("num_sequences", [64, 65, 256])
def test_large_batches_are_near_their_mean(num_sequences: int) -> None:
    times = StepTimes(cost(), POINTS, 200)
    mean = times.ms(num_sequences, 2, np.array([num_sequences]))[0]
    assert times.mean_ms(num_sequences, 2, 0.5, 2.0) == pytest.approx(mean, rel=0.01)


def test_without_tables_times_are_interpolated() -> None:
    times = StepTimes(StepCost.from_tables(VerifyCost()), POINTS, 200)
    assert "no cost table" in times.unknown
    for each in POINTS:
        assert times.ms(each.num_sequences, each.num_requested, NONE) == pytest.approx([each.step_ms])
    assert 20.0 < times.ms(4, 1, NONE)[0] < 26.0
    assert times.ms(64, 1, NONE) == pytest.approx([26.0])


def test_the_stack_says_what_it_costs() -> None:
    """Of the first lane that is ready, and of all drafters that are there: each has its share of the sequences."""
    lanes = LaneStatus(0, "v:1"), LaneStatus(1, "v:2", is_ready=True, verify_cost=TABLE)
    drafters = [DrafterStatus(f"d:{index}", is_connected=index < 2, draft_cost=DRAFTS, draft_ms_per_kv_token=0.0) for index in range(3)]
    found = cost_of_status(CoordinatorStatus("1", 0.0, True, lanes=lanes, drafters=tuple(drafters)))
    assert found.unknown == ""
    assert len(found.drafts) == 2
    two, one = StepTimes(found, POINTS, 200), StepTimes(cost(), POINTS, 200)
    assert two.table_ms(point(64, 4, 1.0)) < one.table_ms(point(64, 4, 1.0))


def test_bumps_of_a_table_are_no_steps() -> None:
    """The table was measured on a busy machine: eight sequences seem to take longer than sixteen, and a step with drafts less than one without."""
    bumpy = StepCost.from_tables(VerifyCost((1, 2, 8, 16, 64), (10.0, 10.0, 90.0, 91.0, 92.0)), DRAFTS)
    points = (point(1, 0, 10.0), point(1, 4, 30.0), point(16, 0, 15.0), point(16, 4, 16.0))
    times = StepTimes(bumpy, points, 200)
    sizes = range(1, 17)
    plain = [times.mean_ms(size, 0, 0.0, 0.0) for size in sizes]
    assert min(plain) == 10.0
    assert max(plain) == 15.0
    for size, ms in zip(sizes, plain, strict=True):
        assert times.ms(size, 0, NONE) == pytest.approx([ms])
        assert times.mean_ms(size, 2, 1.0, 2.0) >= ms
        assert times.ms(size, 4, np.arange(4 * size + 1)).min() >= ms
