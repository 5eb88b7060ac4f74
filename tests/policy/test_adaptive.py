"""Adaptive verification in simulated steps: against every fixed K, and when drafts stop to pay."""

import numpy as np
import pytest

from specwire.messages import DraftCost
from specwire.policy.adaptive import AdaptivePolicy
from specwire.policy.calibration import Calibrator
from specwire.policy.cost import StepCost
from specwire.policy.grades import RETRY_STEPS
from specwire.policy.step_plan import DraftRequest
from tests.policy.simulated_lane import (
    BLOCK,
    K_MAX,
    MODEL,
    VERIFY,
    SimulatedLane,
    expected_tokens,
    fixed_throughput,
    keep,
    mixed,
    observe,
    shape_of,
    uniform,
)

NAN = float("nan")


def num_steps(num_sequences: int) -> int:
    return 600 if num_sequences == 1 else 200


@pytest.mark.parametrize("draft_cost", [BLOCK, MODEL], ids=["block", "model"])
@pytest.mark.parametrize("num_sequences", [1, 16, 64, 128, 256])
def test_uniform_requests(draft_cost: tuple[DraftCost, ...], num_sequences: int) -> None:
    """Nothing to gain from choosing among them: as good as the best fixed K, that is none at all at 256."""
    rates = uniform(num_sequences)
    lane = SimulatedLane.make(draft_cost)
    lane.throughput(rates, 300)  # what it learns first must be earned
    reached = lane.throughput(rates, num_steps(num_sequences))
    fixed = [fixed_throughput(draft_cost, rates, k) for k in range(K_MAX + 1)]
    assert reached >= 0.98 * max(fixed)
    if draft_cost is BLOCK and num_sequences <= 16:
        assert reached >= 2 * fixed[0]


@pytest.mark.parametrize(
    ("draft_cost", "num_sequences", "gain"),
    [(BLOCK, 16, 1.0), (BLOCK, 64, 1.2), (BLOCK, 128, 1.17), (BLOCK, 256, 1.17), (MODEL, 16, 1.0), (MODEL, 64, 1.05), (MODEL, 128, 1.05)],
)
def test_mixed_requests(draft_cost: tuple[DraftCost, ...], num_sequences: int, gain: float) -> None:
    """Half of them with drafts that are good, half with bad ones: better than any fixed K, and never worse than none."""
    rates = mixed(num_sequences)
    lane = SimulatedLane.make(draft_cost)
    lane.throughput(rates, 100)
    reached = lane.throughput(rates, num_steps(num_sequences))
    assert reached >= gain * max(fixed_throughput(draft_cost, rates, k) for k in range(1, K_MAX + 1))
    assert reached >= 0.98 * fixed_throughput(draft_cost, rates, 0)


def chunked(draft_cost: tuple[DraftCost, ...], num_sequences: int, k: int | None) -> float:
    """Tokens a millisecond where a prefill chunk of 512 tokens comes with every fourth token of a sequence: with new requests, as old ones end."""
    rng, rates, runs_ahead = np.random.default_rng(4), uniform(num_sequences), True
    policy = AdaptivePolicy(StepCost.from_tables(VERIFY, draft_cost), Calibrator(K_MAX), K_MAX)
    groups = [policy.calibrator.group("simulated", is_greedy=False)] * num_sequences
    tokens = milliseconds = due = 0.0
    for step in range(300):
        has_chunk = due >= 4 * num_sequences
        due, chunk = due - 4 * num_sequences * has_chunk, 512 * has_chunk
        shape = shape_of(num_sequences, leaves_run_ahead=runs_ahead)
        shape = shape._replace(num_tokens=num_sequences + chunk, num_rows=num_sequences + has_chunk, longest_row=max(1, chunk))
        request = policy.choose_request(step, shape, num_sequences, K_MAX) if k is None else DraftRequest(k)
        asked = request.num_drafts
        num_kept = np.full(num_sequences, asked)
        if k is None and asked:
            kept = keep(policy, request, [[0.8] * asked] * num_sequences, groups, shape, num_sequences)
            num_kept = kept.num_kept
            run = np.cumprod(rng.random((num_sequences, asked)) < 0.8, axis=1).sum(axis=1)
            observe(policy, kept, [asked] * num_sequences, np.minimum(run, num_kept))
        priced = shape._replace(num_requested=asked, leaves_run_ahead=runs_ahead and asked > 0)
        runs_ahead = asked == 0
        due += expected_tokens(rates, num_kept)
        if step >= 100:
            milliseconds += float(policy.cost.step_ms(np.array([int(num_kept.sum())]), priced)[0])
            tokens += expected_tokens(rates, num_kept)
    return tokens / milliseconds


@pytest.mark.parametrize("num_sequences", [32, 128, 192])
def test_steps_with_and_without_prefill_chunks(num_sequences: int) -> None:
    """Each by its own rate would draft too much in the ones with chunks."""
    assert chunked(MODEL, num_sequences, None) >= 0.98 * max(chunked(MODEL, num_sequences, k) for k in range(7))


@pytest.mark.parametrize("num_sequences", [1, 64])
def test_drafts_that_are_never_accepted_cost_little(num_sequences: int) -> None:
    rates = uniform(num_sequences, 0.001)
    lane = SimulatedLane.make(MODEL)
    lane.throughput(rates, 200)
    assert lane.throughput(rates, 1000) >= 0.98 * fixed_throughput(MODEL, rates, 0)
    counters = lane.policy.counters
    assert 0 < counters.num_probes < 100
    assert counters.requested[0] > 1000


def steps_to_return(lane: SimulatedLane, rates: np.ndarray, most: int) -> int:
    """Until 16 of 20 steps in a row ask for drafts."""
    asked: list[bool] = []
    while sum(asked[-20:]) < 16:
        assert len(asked) < most, f"{len(asked)} steps, of which {sum(asked)} asked for drafts"
        asked.append(lane.step(rates)[-1] > 0)
    return len(asked)


@pytest.mark.parametrize("has_plain_scores", [False, True], ids=["scores", "no scores"])
@pytest.mark.parametrize("draft_cost", [BLOCK, MODEL], ids=["block", "model"])
@pytest.mark.parametrize(("num_sequences", "before"), [(1, 0.01), (4, 0.1), (64, 0.1)])
def test_probes_find_out_in_tens_of_steps_that_drafts_pay_again(
    draft_cost: tuple[DraftCost, ...], num_sequences: int, before: float, has_plain_scores: bool
) -> None:
    """And until then, they cost at most 2%. Also where scores say nothing of the change, so that only outcomes show it."""
    lane = SimulatedLane.make(draft_cost)
    lane.has_plain_scores = has_plain_scores
    bad, good = uniform(num_sequences, before), uniform(num_sequences, 0.9)
    lane.throughput(bad, 500)
    assert lane.throughput(bad, 300) >= 0.98 * fixed_throughput(draft_cost, bad, 0)
    assert sum(lane.step(bad)[-1] == 0 for _ in range(20)) >= 15
    assert steps_to_return(lane, good, 400) <= (200 if num_sequences == 1 else 150)
    lane.throughput(good, 150)
    assert lane.throughput(good, 100) >= 0.95 * max(fixed_throughput(draft_cost, good, k) for k in range(K_MAX + 1))


def test_sequences_whose_text_changes_are_found() -> None:
    """Half of them are not asked for drafts, since theirs are bad; then it is the other half."""
    lane = SimulatedLane.make(BLOCK)
    lane.throughput(mixed(64), 200)
    _, num_kept, _, k = lane.step(mixed(64))
    assert k == K_MAX
    assert num_kept[::2].mean() > 4 > 0.2 > num_kept[1::2].mean()
    changed = mixed(64)[::-1]
    lane.throughput(changed, 80)
    assert lane.throughput(changed, 100) >= 1.2 * max(fixed_throughput(BLOCK, changed, k) for k in range(K_MAX + 1))


def test_sequences_with_bad_drafts_are_asked_now_and_then() -> None:
    lane = SimulatedLane.make(BLOCK)
    rates = mixed(128)
    lane.throughput(rates, 100)
    for _ in range(3):  # each, once in so many steps
        before = lane.graded.copy()
        lane.throughput(rates, RETRY_STEPS)
        assert (lane.graded > before).all()
    request = lane.policy.choose_request(lane.num_steps + 1, shape_of(128), 128, K_MAX, lane.count_grades)
    assert request.by_grade[1] < request.num_drafts == max(request.by_grade) == len(request.num_asked)
    assert 60 <= request.num_asked[-1] <= 70, "about the half whose drafts are good"
    assert request.num_asked[0] >= request.num_asked[-1]


def test_k_differs_by_grade_only_where_that_pays() -> None:
    """Drafts that cost next to nothing are asked of all."""
    free = (DraftCost(1, 1, 0.01), DraftCost(7, 256, 0.02))
    lane = SimulatedLane.make(free)
    lane.throughput(mixed(32), 200)
    assert lane.policy.choose_request(lane.num_steps + 1, shape_of(32), 32, K_MAX, lane.count_grades).by_grade == ()


def bursts(num_steps: int, k: int | None) -> float:
    """Tokens a millisecond of 16 sequences whose text repeats itself in a quarter of the time: then 70% of the rows have drafts, accepted at .8."""
    rng, number, runs_ahead = np.random.default_rng(3), 16, True
    policy = AdaptivePolicy(StepCost.from_tables(VERIFY, [DraftCost(1, 1, 0.02), DraftCost(7, 256, 5.0)]), Calibrator(K_MAX), K_MAX)
    groups = [policy.calibrator.group("ngram", is_greedy=False)] * number
    tokens = milliseconds = 0.0
    for step in range(num_steps):
        shape = shape_of(number, leaves_run_ahead=runs_ahead)
        request = policy.choose_request(step, shape, number, K_MAX) if k is None else DraftRequest(k)
        asked = request.num_drafts
        num_kept = num_accepted = np.zeros(number, dtype=np.int64)
        if asked:
            has_drafts = (rng.random(number) < 0.7) & (step % 400 < 100)
            num_kept = asked * has_drafts
            run = np.cumprod(rng.random((number, asked)) < 0.8, axis=1).sum(axis=1)
            if k is None:
                kept = keep(policy, request, [[0.8] * asked if has else [] for has in has_drafts], groups, shape, number)
                num_kept = kept.num_kept
                observe(policy, kept, [asked] * number, np.minimum(run, num_kept))
            num_accepted = np.minimum(run, num_kept)
        priced = shape._replace(num_requested=asked, leaves_run_ahead=runs_ahead and asked > 0)
        milliseconds += float(policy.cost.step_ms(np.array([int(num_kept.sum())]), priced)[0])
        tokens += number + int(num_accepted.sum())
        runs_ahead = asked == 0
    return tokens / milliseconds


def test_drafts_that_come_in_bursts() -> None:
    """It draws back in between, and is back soon enough."""
    reached = bursts(1600, None)
    assert reached >= 1.15 * bursts(1600, 0)
    assert reached >= max(bursts(1600, k) for k in (3, 7))


def test_without_probes_nothing_is_tried_again() -> None:
    lane = SimulatedLane.make(BLOCK)
    lane.policy = AdaptivePolicy(lane.policy.cost, lane.policy.calibrator, K_MAX, probe_share=0)
    lane.throughput(uniform(4, 0.01), 300)
    lane.throughput(uniform(4, 0.9), 300)
    assert lane.policy.counters.num_probes == 0
    assert lane.step(uniform(4, 0.9))[-1] == 0


def test_k_grows_as_a_batch_drains() -> None:
    """A rollout of 256 sequences of long-tailed lengths, to its last token."""
    lengths = np.minimum(np.random.default_rng(1).lognormal(4.6, 0.9, 256), 1500).astype(np.int64)
    lane = SimulatedLane.make(BLOCK)
    left, total_ms = lengths.copy(), 0.0
    asked: dict[int, list[int]] = {}
    while left.any():
        running = np.flatnonzero(left)
        step_ms, _, num_accepted, k = lane.step(uniform(len(running)))
        asked.setdefault(len(running), []).append(k)
        total_ms += step_ms
        left[running] = np.maximum(0, left[running] - 1 - num_accepted)

    def wall_ms(k: int) -> float:
        rng, left, total_ms = np.random.default_rng(2), lengths.copy(), 0.0
        while left.any():
            running = np.flatnonzero(left)
            number = len(running)
            run = np.cumprod(rng.random((number, k)) < 0.8, axis=1).sum(axis=1) if k else 0
            total_ms += float(lane.policy.cost.step_ms(np.array([number * k]), shape_of(number, k=k))[0])
            left[running] = np.maximum(0, left[running] - 1 - run)
        return total_ms

    walls = [wall_ms(k) for k in range(K_MAX + 1)]
    assert total_ms <= 0.85 * walls[0]
    assert total_ms <= 1.02 * min(walls)
    many, few = ([k for number, ks in asked.items() if low <= number < high for k in ks] for low, high in ((200, 257), (1, 20)))
    assert np.median(many) < np.median(few) == K_MAX
