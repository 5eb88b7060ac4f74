"""Whole steps by the clock: which times say something, what they do to prices, and what that is worth to a lane."""

import itertools
from functools import partial
from operator import le

import numpy as np
import pytest

from specwire.policy.clock import StepClock, StepKind
from specwire.policy.cost import StepCost
from specwire.policy.probes import PLAIN_STEPS, PlainSpells
from tests.policy.simulated_lane import BLOCK, K_MAX, VERIFY, Overhead, SimulatedLane, fixed_throughput, shape_of, uniform

AHEAD, LOCKSTEP, OTHER = StepKind.RUN_AHEAD, StepKind.LOCKSTEP, StepKind.OTHER
MS = 1_000_000


def committed(clock: StepClock, kinds: list[StepKind], first: int = 1) -> list[float]:
    """A step every 10 ms."""
    return [clock.committed(step, kind, 10 * MS * step) for step, kind in enumerate(kinds, start=first)]


@pytest.mark.parametrize(
    ("kinds", "known"),
    [
        ([AHEAD, AHEAD, AHEAD], [0, 10, 10]),
        ([LOCKSTEP, LOCKSTEP], [0, 10]),
        ([AHEAD, LOCKSTEP, LOCKSTEP, AHEAD, AHEAD], [0, 0, 10, 0, 10]),
        ([OTHER, LOCKSTEP, OTHER, AHEAD, AHEAD], [0, 0, 0, 0, 10]),
        ([LOCKSTEP, LOCKSTEP, *[AHEAD] * 60, LOCKSTEP], [0, 10, 0, *[10] * 59, 0]),
        ([LOCKSTEP, LOCKSTEP, *[AHEAD] * 130, LOCKSTEP], [0, 10, 0, *[10] * 129, 10]),
    ],
)
def test_times_are_known_behind_steps_of_the_same_kind_and_of_rare_steps_with_drafts_behind_any(kinds: list[StepKind], known: list[float]) -> None:
    assert committed(StepClock(), kinds) == known


def test_no_time_is_known_behind_a_pause_or_a_step_that_was_left_out() -> None:
    clock = StepClock()
    assert committed(clock, [AHEAD, AHEAD]) == [0, 10]
    clock.pause()
    assert committed(clock, [AHEAD, AHEAD], 3) == [0, 10]
    assert committed(clock, [AHEAD, AHEAD], 6) == [0, 10]


def observe(clock: StepClock, kind: StepKind, times: list[float], size: int = 16, parts_ms: float = 10.0) -> list[tuple[float, float]]:
    told = [clock.observe(kind, clock_ms, size, size, lambda: (parts_ms, parts_ms)) for clock_ms in times]
    return [whole for whole in told if whole is not None]


def test_factors_are_of_each_kind_and_of_sizes_nearby() -> None:
    clock = StepClock()
    observe(clock, LOCKSTEP, [15.0] * 100)
    observe(clock, AHEAD, [11.0] * 100)
    assert clock.lockstep.at(16) == pytest.approx(1.5, rel=0.01)
    assert clock.run_ahead.at(16) == pytest.approx(1.1, rel=0.01)
    assert clock.lockstep.at(32) == pytest.approx(1.5, rel=0.05)
    assert clock.errors.median < 0.02


def test_two_answers_that_are_committed_at_once_are_two_periods() -> None:
    clock = StepClock()
    told = observe(clock, AHEAD, [0.1, 19.9] * 40)
    assert [measured for _, measured in told] == pytest.approx([10.0] * 20)
    assert clock.run_ahead.at(16) == pytest.approx(1.0, rel=0.01)


def test_a_spell_of_two_periods_counts_and_a_single_one_does_not() -> None:
    clock = StepClock()
    observe(clock, AHEAD, [20.0])
    assert observe(clock, LOCKSTEP, [10.0]) == [(10.0, 10.0)], "the step in lockstep"
    observe(clock, AHEAD, [12.0, 16.0])
    assert observe(clock, LOCKSTEP, [0.0]) == [(10.0, 14.0)], "the two before it, which it ends though its own time is not known"


def test_steps_of_other_sizes_are_not_put_together() -> None:
    clock = StepClock()
    observe(clock, AHEAD, [10.0, 10.0], 16)
    assert observe(clock, AHEAD, [40.0, 40.0, 40.0, 40.0], 64, 40.0) == [(10.0, 10.0), (40.0, 40.0)]


def test_a_hiccup_moves_little() -> None:
    clock = StepClock()
    observe(clock, LOCKSTEP, [10.0] * 200)
    observe(clock, LOCKSTEP, [5_000.0, 10.0, 10.0, 10.0])
    assert clock.lockstep.at(16) < 1.15


def test_plain_steps_soon_after_prompts_are_believed_less_than_those_of_a_spell_later() -> None:
    """Drafters compute prompts and streams begin, so that they take longer; what they seem to take makes drafts look good."""
    clock = StepClock()
    for _ in range(16):
        clock.observe(AHEAD, 13.0, 16, 16, lambda: (10.0, 10.0), is_settled=False)
    assert clock.run_ahead.at(16) == pytest.approx(1.25, rel=0.05), "they are all that is known"
    assert clock.run_ahead.deviation(16) > 0.1
    observe(clock, LOCKSTEP, [20.0] * 12)
    observe(clock, AHEAD, [10.0, 10.0])
    observe(clock, LOCKSTEP, [20.0])
    assert clock.run_ahead.at(16) < 1.12
    assert clock.run_ahead.deviation(16) < 0.1


def test_what_plain_steps_take_is_less_sure_the_longer_there_were_none() -> None:
    clock = StepClock()
    observe(clock, AHEAD, [10.0] * 40)
    known, factor = clock.run_ahead.deviation(16), clock.run_ahead.at(16)
    assert known < 0.05
    observe(clock, LOCKSTEP, [20.0] * 300)
    assert clock.run_ahead.deviation(16) == pytest.approx(0.11, abs=0.02)
    assert clock.run_ahead.at(16) == factor


def test_prices_are_multiplied() -> None:
    cost, shape, drafting = StepCost.from_tables(VERIFY, BLOCK), shape_of(16), shape_of(16, k=3)
    budgets = np.arange(49)
    before = cost.step_ms(budgets, drafting), cost.step_ms(budgets[:1], shape), cost.plain_ms(shape)
    asked = np.array([[16, 16, 16]])
    np.testing.assert_allclose(cost.lockstep_ms(budgets, asked, shape)[0], before[0])
    np.testing.assert_allclose(cost.lockstep_parts_ms(48, shape, float(cost.draft_ms(asked, shape)[0])), (before[0][-1], before[0][0]))
    observe(cost.clock, LOCKSTEP, [15.0] * 100)
    observe(cost.clock, AHEAD, [12.0] * 100)
    ahead, lockstep = cost.clock.run_ahead.at(16), cost.clock.lockstep.up_to(64)[16:65]
    assert (ahead, lockstep[0]) == pytest.approx((1.2, 1.5), rel=0.01)
    longer = before[0] + before[0][0] * (lockstep - 1.0)
    np.testing.assert_allclose(cost.step_ms(budgets, drafting), longer)
    np.testing.assert_allclose(cost.clock.in_lockstep(cost.budgets_parts_ms(48, drafting), drafting.num_tokens), longer)
    np.testing.assert_allclose(cost.lockstep_ms(budgets, asked, shape)[0], longer)
    assert cost.step_ms(budgets[:1], shape)[0] == pytest.approx(before[1][0] * ahead)
    assert cost.plain_ms(shape) == pytest.approx(before[2] * ahead)
    assert cost.plain_parts_ms(shape) == pytest.approx(before[2]), "what the clock is compared with"


# --- when a lane that drafts makes steps without drafts --------------------------------------------------------------


def test_spells_are_some_steps_in_a_row_at_a_bounded_share_of_the_time() -> None:
    spells = PlainSpells(0.005)
    due = [spells.is_due(10.0, 20.0, is_in_doubt=False) for _ in range(4000)]
    starts = [step for step, (before, now) in enumerate(zip([False, *due], due, strict=False)) if now and not before]
    assert sum(due) == PLAIN_STEPS * len(starts)
    assert len(starts) == pytest.approx(10, abs=1), "one in 400 steps, since 20 are earned by 4000"


def test_where_it_is_in_doubt_whether_drafting_pays_there_is_one_in_64_steps() -> None:
    spells = PlainSpells(0.0)
    assert sum(spells.is_due(10.0, 20.0, is_in_doubt=True) for _ in range(640)) == pytest.approx(10 * PLAIN_STEPS, abs=PLAIN_STEPS)
    assert not any(spells.is_due(10.0, 20.0, is_in_doubt=False) for _ in range(640)[PLAIN_STEPS:])


def test_the_first_spells_since_drafting_began_come_sooner_and_none_where_it_is_too_late() -> None:
    spells = PlainSpells(0.0)
    for _ in range(100):
        spells.note_plain()
    due = [spells.is_due(10.0, 20.0, partial(le, 250, step), is_in_doubt=True) for step in range(400)]
    starts = [step for step, (before, now) in enumerate(zip([False, *due], due, strict=False)) if now and not before]
    assert [after - before - PLAIN_STEPS for before, after in itertools.pairwise([-PLAIN_STEPS, *starts])] == [23, 47, 63, 63]


# --- what it is worth ------------------------------------------------------------------------------------------------


def constant(ms: float) -> Overhead:
    return lambda number, num_draft_tokens: ms if num_draft_tokens >= 0 else 0.0


def by_tokens(ms: float, per_token: float) -> Overhead:
    return lambda number, num_draft_tokens: ms + per_token * (number + num_draft_tokens) if num_draft_tokens >= 0 else 0.0


OVERHEADS = {"3 ms": constant(3.0), "5 ms": constant(5.0), "5 ms and 16 us a token": by_tokens(5.0, 0.016)}


@pytest.mark.parametrize("overhead", OVERHEADS.values(), ids=OVERHEADS)
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 64, 128, 256])
def test_what_no_part_shows(num_sequences: int, overhead: Overhead) -> None:
    """As good as the best fixed K and as none, for a drafter that costs hardly anything."""
    rates = uniform(num_sequences)
    lane = SimulatedLane.make(BLOCK)
    lane.overhead, lane.jitter = overhead, 0.05
    lane.throughput(rates, 300)
    reached = lane.throughput(rates, 400)
    assert reached >= 0.98 * max(fixed_throughput(BLOCK, rates, k, overhead) for k in range(K_MAX + 1))
