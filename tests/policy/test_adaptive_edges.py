"""Choices of adaptive verification where costs, drafters or drafts are missing, late or promise too much."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.messages import VerifyCost
from specwire.policy.adaptive import AdaptivePolicy, lay_out
from specwire.policy.calibration import Calibrator
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.curves import DraftCurve, VerifyCurve
from specwire.policy.grades import UNKNOWN
from specwire.policy.probes import PLAIN_STEPS, num_probed_rows
from specwire.policy.step_plan import DraftRequest, ProbeRoom, cap_request
from tests.policy.simulated_lane import BLOCK, CONTEXT, K_MAX, MODEL, VERIFY, SimulatedLane, keep, mixed, observe, shape_of, uniform

NAN = float("nan")


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        (StepCost.from_tables(VerifyCost(), BLOCK), "the verifier has no cost table of two sizes or more"),
        (StepCost.from_tables(VerifyCost((4,), (5.0,)), BLOCK), "the verifier has no cost table of two sizes or more"),
        (StepCost(VerifyCurve(VERIFY), [DraftCurve(())]), "a drafter has no cost table"),
    ],
)
def test_unknown_costs_fall_back_to_fixed_k_and_say_so(cost: StepCost, reason: str) -> None:
    policy = AdaptivePolicy(cost, Calibrator(K_MAX), K_MAX)
    request = policy.choose_request(1, shape_of(2), 2, 5)
    assert request == DraftRequest(5, fallback=reason)
    group = policy.calibrator.group("m", is_greedy=False)
    kept = keep(policy, request, [[0.0] * 5, [NAN] * 3], [group, group], shape_of(2), 2)
    assert kept.num_kept.tolist() == [5, 3]
    observe(policy, kept, [5, 5], np.array([5, 0]))
    assert policy.counters.num_fallbacks == 1
    assert policy.calibrator.trials.sum() == 6, "it learns all the same"


def test_equal_calls_give_equal_choices() -> None:
    lanes = [SimulatedLane.make(MODEL, seed=3) for _ in range(2)]
    assert lanes[0].throughput(mixed(32), 150) == lanes[1].throughput(mixed(32), 150)
    assert lanes[0].policy.counters == lanes[1].policy.counters


@pytest.mark.parametrize(("most", "num_drafting"), [(0, (4,)), (7, ()), (7, (0, 0))])
def test_nobody_is_asked_where_nobody_can_draft(most: int, num_drafting: tuple[int, ...]) -> None:
    drafts = [SimulatedLane.make(BLOCK).policy.cost.drafts[0]] * len(num_drafting)
    lane_cost = StepCost(StepCost.from_tables(VERIFY).verify, drafts)
    policy = AdaptivePolicy(lane_cost, Calibrator(K_MAX), K_MAX)
    assert policy.choose_request(1, StepShape(4, 4, num_drafting=num_drafting), 4, most) == DraftRequest(0)


def test_plans_that_come_to_nothing_change_nothing() -> None:
    """A probe waits for the rounds in flight, and is not forgotten; a ceiling that has come down holds at once."""
    once, again = (SimulatedLane.make(MODEL, seed=6).policy for _ in range(2))
    for step in range(200):
        request = once.choose_request(step, shape_of(128), 128, K_MAX)
        assert [again.choose_request(step, shape_of(128), 128, K_MAX) for _ in range(3)] == [request] * 3
    assert again.choose_request(199, shape_of(128), 128, 1).num_drafts <= 1
    assert once.counters == again.counters
    assert once.counters.num_probes > 0


@pytest.mark.parametrize("most", [1, 3])
def test_the_ceiling_holds_for_probes_too(most: int) -> None:
    policy = SimulatedLane.make(BLOCK).policy
    asked = {policy.choose_request(step, shape_of(8), 8, most).num_drafts for step in range(50)}
    assert max(asked) <= most


def test_a_lone_probe_whose_ceiling_comes_down_still_asks_few() -> None:
    """And it waits for those only."""
    waits, policy = [], SimulatedLane.make(MODEL, seed=6).policy

    def wait_ms(num_drafts: int, num_sequences: int) -> float:
        waits.append((num_drafts, num_sequences))
        return 0.0

    room = ProbeRoom(wait_ms, lambda: True)
    steps = iter(range(1000))
    while not (request := policy.choose_request(step := next(steps), shape_of(128), 128, K_MAX, room=room)).is_lone:
        assert not request.num_drafts
    assert request.num_drafts > 1
    assert waits[-1] == (request.num_drafts, num_probed_rows(128))
    assert policy.choose_request(step, shape_of(128), 128, 1, room=room) == request._replace(num_drafts=1, num_asked=(num_probed_rows(128),))
    assert policy.choose_request(step, shape_of(128), 128, 0, room=room) == DraftRequest(0)
    assert policy.choose_request(step, shape_of(128), 128, K_MAX, room=room) == request


def test_no_grade_is_asked_for_more_than_the_ceiling() -> None:
    request = DraftRequest(5, by_grade=(5, 0, 2, 3, 5), num_asked=(8, 8, 7, 4, 4))
    assert cap_request(request, 5) is request
    assert cap_request(request, 2) == DraftRequest(2, by_grade=(2, 0, 2, 2, 2), num_asked=(8, 8))
    assert cap_request(DraftRequest(5, fallback="no table"), 0) == DraftRequest(0, fallback="no table")


@pytest.mark.parametrize(("num_rows", "num_probed"), [(1, 1), (3, 3), (7, 4), (16, 4), (100, 7)])
def test_a_probe_verifies_all_drafts_of_some_rows_in_turn(num_rows: int, num_probed: int) -> None:
    """Though nothing pays: scores of 0 in a batch whose every token costs."""
    dear = StepCost.from_tables(VerifyCost((1, 1000), (1.0, 1000.0)), BLOCK)
    policy = AdaptivePolicy(dear, Calibrator(3), 3)
    group = policy.calibrator.group("m", is_greedy=False)
    probed = set()
    for _ in range(16):
        policy.counters.num_probes += 1
        kept = keep(policy, DraftRequest(3, is_probe=True), [[0.0] * 3] * num_rows, [group] * num_rows, shape_of(num_rows), num_rows)
        rows = np.flatnonzero(kept.num_kept).tolist()
        assert num_probed - 1 <= len(rows) <= num_probed
        assert kept.num_kept[rows].tolist() == [3] * len(rows)
        probed.update(rows)
    assert probed == set(range(num_rows))


def test_rows_without_drafts_and_rows_whose_outcome_is_lost() -> None:
    policy = SimulatedLane.make(BLOCK).policy
    group = policy.calibrator.group("m", is_greedy=False)
    kept = keep(policy, DraftRequest(3), [[1.0] * 3, [], [1.0], [1.0] * 3], [group] * 4, shape_of(4), 4)
    assert kept.num_kept.tolist() == [3, 0, 1, 3]
    before = policy.forecast.means()[UNKNOWN]
    observe(policy, kept, [3, 3, 1, 3], np.array([3, 0, 1, -1]))
    assert policy.forecast.means()[UNKNOWN, 0] < before[0], "no draft came, though three were asked for"
    assert policy.calibrator.trials.sum() == 4, "three of the first row and one of the third"
    assert (policy.counters.num_offered, policy.counters.num_kept) == (7, 7)


def test_late_drafters_make_drafts_worth_less() -> None:
    policy = SimulatedLane.make(BLOCK).policy
    group = policy.calibrator.group("m", is_greedy=False)
    before = policy.forecast.acceptance()
    for _ in range(20):
        observe(policy, keep(policy, DraftRequest(2), [[]] * 8, [group] * 8, shape_of(8), 8), [2] * 8, np.zeros(8, dtype=np.int64))
    assert policy.forecast.acceptance()[0] < 0.1 * before[0]


def test_hysteresis_keeps_k_between_choices_that_are_about_as_good() -> None:
    """Of 24 sequences K = 4 is best, of 32 K = 3, by less than 3%."""
    changes = []
    for hysteresis in (0.0, 0.03):
        lane = SimulatedLane.make(MODEL)
        lane.policy = AdaptivePolicy(lane.policy.cost, lane.policy.calibrator, K_MAX, hysteresis=hysteresis, probe_share=0)
        asked = [lane.step(uniform(24 + 8 * (step % 2)))[-1] for step in range(250)][150:]
        changes.append(np.count_nonzero(np.diff([k for k in asked if k])))  # but for steps that only measure
    assert changes[0] > 90
    assert changes[1] == 0


def test_scores_are_laid_out() -> None:
    scores = lay_out(np.array([0.5, 0.25, 1.0]), np.array([2, 0, 1]), 2)
    np.testing.assert_array_equal(scores, [[0.5, 0.25], [0.0, 0.0], [1.0, 0.0]])
    assert lay_out(np.zeros(0), np.zeros(0, dtype=np.int64), 3).shape == (0, 3)


STEPS = st.tuples(st.integers(1, 20), st.integers(0, K_MAX), st.sampled_from([0, 0, 1, 300]), st.booleans())


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=25), st.integers(0, 2**32 - 1))
def test_whatever_comes_choices_are_ones_that_can_be_carried_out(steps: list[tuple[int, int, int, bool]], seed: int) -> None:
    """Batches, ceilings and chunks that change, scores of all sorts, rows without drafts, answers that are lost."""
    rng = np.random.default_rng(seed)
    policy = SimulatedLane.make(MODEL).policy
    kinds = [policy.calibrator.group(method, is_greedy=is_greedy) for method in ("a", "b") for is_greedy in (False, True)]
    for step, (number, most, chunk, leaves) in enumerate(steps):
        shape = shape_of(number, leaves_run_ahead=leaves)._replace(num_tokens=number + chunk, longest_row=max(1, chunk))
        request = policy.choose_request(step, shape, number, most)
        assert 0 <= request.num_drafts <= most
        if not request.num_drafts:
            continue
        asked = rng.integers(1, request.num_drafts + 1, number)
        offered = [int(rng.integers(0, most + 1)) for most in asked]
        scores = [rng.choice([0.0, 1.0, 0.5, 0.999, NAN, rng.random()], size).tolist() for size in offered]
        kept = keep(policy, request, scores, rng.choice(kinds, number).tolist(), shape, number)
        assert (kept.num_kept >= 0).all()
        assert (kept.num_kept <= offered).all()
        assert kept.expected_tokens >= number
        assert kept.cost_ms > 0
        observe(policy, kept, asked.tolist(), np.array([rng.integers(-1, most + 1) for most in kept.num_kept]))
    assert np.isfinite(policy.forecast.acceptance()).all()
    assert sum(policy.counters.requested) == len(steps)
    for each in policy.calibrator.statistics():
        assert 0 <= each.calibration_error <= 1


def test_drafting_that_loses_is_given_up_for_a_while_whatever_the_forecast_promises() -> None:
    lane = SimulatedLane(
        AdaptivePolicy(StepCost.from_tables(VERIFY, BLOCK), Calibrator(K_MAX), K_MAX, probe_share=0.0), 0.5, np.random.default_rng(0)
    )
    rates = uniform(8)
    assert sum(lane.step(rates)[3] > 0 for _ in range(100)) >= 100 - 2 * PLAIN_STEPS, "all but those that show what a step without drafts takes"
    # Steps that are as long as six without drafts, in which no draft was accepted.
    planner = lane.policy._planner
    worth, promised = planner.promise(shape_of(8))
    for _ in range(100):
        planner.observe_step(0.0, 20.0, worth, promised, 8)
    asked = [lane.step(rates)[3] for _ in range(2000)]
    assert 0 in asked[:20]
    first = asked.index(0)
    assert not any(asked[first : first + 50])
    assert all(asked[-100:])


@pytest.mark.parametrize(("num_accepted", "gives_up"), [(9.0, False), (3.0, True)])
def test_promises_that_are_too_good_count_only_where_drafting_loses(num_accepted: float, gives_up: bool) -> None:
    """Drafts of eight sequences whose time is worth six tokens, and that were promised to bring 32 more."""
    lane = SimulatedLane.make(BLOCK)
    lane.policy = AdaptivePolicy(lane.policy.cost, lane.policy.calibrator, K_MAX, probe_share=0)
    rates = uniform(8)
    for _ in range(20):
        lane.step(rates)
    planner = lane.policy._planner
    worth, _ = planner.promise(shape_of(8))
    for _ in range(100):
        planner.observe_step(num_accepted, 6.0 / worth, worth, 4.0, 8)
    request = lane.policy.choose_request(lane.num_steps + 1, shape_of(8), 8, K_MAX - 1)  # another ceiling: it is planned anew
    assert (request.num_drafts == 0) == gives_up


@pytest.mark.parametrize("num_losses", [5, 11, 20, 40])
def test_beside_chunks_drafting_that_lost_may_still_be_the_cheaper_step(num_losses: int) -> None:
    """Steps that run ahead take three times as long as by the table, and steps with drafts, of which none was accepted, took 30 ms longer still."""
    policy, number = SimulatedLane.make(BLOCK).policy, 8
    shape, table_ms = shape_of(number), policy.cost.verify.table_ms_of(number, number, number * CONTEXT)
    for _ in range(100):
        policy.cost.clock.run_ahead.observe(number, table_ms, 3 * table_ms)
    assert policy.choose_request(1, shape, number, K_MAX).num_drafts == K_MAX
    worth, promised = policy._planner.promise(shape)
    for _ in range(num_losses):
        policy._planner.observe_step(0.0, 30.0, worth, promised, number)
    beside_chunk = shape._replace(num_tokens=number + 1500, num_rows=number + 1, longest_row=1500)
    assert (policy.choose_request(2, beside_chunk, number, K_MAX - 1).num_drafts > 0) == (num_losses < 40)


def test_the_choice_to_draft_nothing_holds_longer_while_nothing_new_is_known() -> None:
    lane = SimulatedLane.make(MODEL)
    bad = uniform(4, 0.01)
    lane.throughput(bad, 300)
    policy = AdaptivePolicy(lane.policy.cost, lane.policy.calibrator, K_MAX, probe_share=0)
    policy.forecast = policy._planner._forecast = lane.policy.forecast
    plans: list[int] = []

    def count_grades() -> np.ndarray:
        plans.append(step)
        return lane.count_grades()

    for step in range(300):
        assert policy.choose_request(step, shape_of(4), 4, K_MAX, count_grades).num_drafts == 0
    assert 10 <= len(plans) <= 15
    policy._planner.note_news()
    before = len(plans)
    for step in range(300, 314):
        policy.choose_request(step, shape_of(4), 4, K_MAX, count_grades)
    assert len(plans) > before
