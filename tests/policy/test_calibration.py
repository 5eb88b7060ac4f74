"""Online calibration: what it learns, what it does not look at, what it makes of bad scores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.policy.calibration import WINDOW, Calibrator, isotonic

NAN = float("nan")


def sigmoid(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))


def feed(calibrator: Calibrator, scores: np.ndarray, is_accepted: np.ndarray, group: int, num_verified: int | None = None) -> None:
    """One step of rows [R, K], all of whose drafts are verified unless said otherwise."""
    num_verified = scores.shape[1] if num_verified is None else num_verified
    num_accepted = np.minimum(np.cumprod(is_accepted, axis=1).sum(axis=1), num_verified)
    drafts = calibrator.calibrate(scores, np.full(len(scores), group))
    calibrator.observe(drafts, np.full(len(scores), num_verified), num_accepted)


def confidence(calibrator: Calibrator, group: int, score: float, position: int = 0) -> float:
    return float(calibrator.calibrate(np.full((1, position + 1), score), np.array([group])).confidences[0, position])


def logistic(rng: np.random.Generator, shape: tuple[int, int], step: int) -> tuple[np.ndarray, np.ndarray]:
    log_odds = rng.normal(2, 2.5, shape)
    return sigmoid(log_odds), sigmoid(0.44 * log_odds - 0.3 - 0.2 * np.arange(shape[1]))


def two_kinds(rng: np.random.Generator, shape: tuple[int, int], step: int) -> tuple[np.ndarray, np.ndarray]:
    """Requests of which drafts are accepted at .9 or .3; scores are that with noise."""
    rates = np.where(rng.random((shape[0], 1)) < 0.5, 0.9, 0.3) + np.zeros(shape)
    return sigmoid(np.log(rates / (1 - rates)) + rng.normal(0, 0.5, shape)), rates


def match_lengths(rng: np.random.Generator, shape: tuple[int, int], step: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = rng.choice([2, 3, 4], (shape[0], 1)) + np.zeros(shape, dtype=np.int64)
    return lengths / (lengths + 1), np.array([0, 0, 0.25, 0.5, 0.8])[lengths]


def threshold(rng: np.random.Generator, shape: tuple[int, int], step: int) -> tuple[np.ndarray, np.ndarray]:
    log_odds = rng.normal(0, 3, shape)
    return sigmoid(log_odds), np.where(log_odds > 2, 0.97, 0.4)


def drifting(rng: np.random.Generator, shape: tuple[int, int], step: int) -> tuple[np.ndarray, np.ndarray]:
    log_odds = rng.normal(1, 2, shape)
    return sigmoid(log_odds), sigmoid(0.7 * log_odds + (1.2 if step < 200 else -0.8))


@pytest.mark.parametrize("stream", [logistic, two_kinds, match_lengths, threshold, drifting])
def test_calibration_error_is_small_whatever_the_scores_mean(stream) -> None:
    rng = np.random.default_rng(7)
    calibrator = Calibrator(4)
    group = calibrator.group("m", is_greedy=False)
    for step in range(1200):
        scores, rates = stream(rng, (16, 4), step)
        feed(calibrator, scores, rng.random(rates.shape) < rates, group)
    [statistics] = calibrator.statistics()
    assert stream is drifting or statistics.calibration_error <= 0.03
    # Later positions are seen rarely: after a change they need longer.
    assert max(statistics.calibration_error_by_position[:2]) <= 0.03
    # Of fresh scores against the true rates, which single outcomes do not show.
    scores, rates = stream(rng, (2000, 4), 1200)
    drafts = calibrator.calibrate(scores, np.full(2000, group))
    for level in np.linspace(0.05, 0.95, 10):
        near = np.abs(drafts.confidences[:, 0] - level) < 0.05
        if near.sum() > 100:
            assert drafts.confidences[near, 0].mean() == pytest.approx(rates[near, 0].mean(), abs=0.06)


def test_before_any_data_it_is_cautious_and_rises_with_the_score() -> None:
    calibrator = Calibrator(3)
    group = calibrator.group("m", is_greedy=True)
    values = [confidence(calibrator, group, score) for score in (0.0, 0.01, 0.3, 0.5, 2 / 3, 0.9, 0.99, 1.0)]
    assert values == sorted(values)
    assert 0.35 < confidence(calibrator, group, 0.5) < 0.55
    assert 0.6 < confidence(calibrator, group, 0.9) < 0.8
    assert confidence(calibrator, group, 0.9, position=2) == confidence(calibrator, group, 0.9)
    assert calibrator.statistics() == []


def test_later_positions_start_from_the_ones_before() -> None:
    calibrator = Calibrator(3)
    group = calibrator.group("m", is_greedy=False)
    for _ in range(100):
        feed(calibrator, np.full((8, 1), 0.9), np.zeros((8, 1), dtype=bool), group)
    assert confidence(calibrator, group, 0.9) < 0.02
    assert confidence(calibrator, group, 0.9, position=2) < 0.02


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "expected"),
    [(0, 0, []), (1, 0, [1]), (1, 1, [1]), (3, 0, [1]), (3, 1, [1, 1]), (3, 2, [1, 1, 1]), (3, 3, [1, 1, 1]), (2, 2, [1, 1])],
)
def test_positions_behind_a_rejection_or_a_trim_are_not_observed(num_verified: int, num_accepted: int, expected: list[int]) -> None:
    calibrator = Calibrator(3)
    drafts = calibrator.calibrate(np.full((1, 3), 0.5), np.array([calibrator.group("m", is_greedy=False)]))
    calibrator.observe(drafts, np.array([num_verified]), np.array([num_accepted]))
    observed = [list(each.num_observed_by_position) for each in calibrator.statistics()]
    assert observed == ([expected] if expected else [])
    assert calibrator.accepted.sum() == num_accepted


def test_bad_scores() -> None:
    calibrator = Calibrator(6)
    group = calibrator.group("m", is_greedy=False)
    drafts = calibrator.calibrate(np.array([[NAN, -1.0, 2.0, float("inf"), float("-inf"), 1.0]]), np.array([group]))
    none, high = confidence(calibrator, group, NAN), confidence(calibrator, group, 1.0)
    assert confidence(calibrator, group, 0.0) < none < high
    assert drafts.confidences[0].tolist() == [none, none, high, high, none, high]


def test_what_drafts_without_a_score_are_worth_is_learned_apart() -> None:
    calibrator = Calibrator(2)
    group = calibrator.group("m", is_greedy=False)
    assert confidence(calibrator, group, NAN) == pytest.approx(confidence(calibrator, group, 0.5), abs=0.03)
    for is_accepted, score in ((True, NAN), (False, 0.5)) * 100:
        feed(calibrator, np.full((4, 2), score), np.full((4, 2), is_accepted), group)
    assert confidence(calibrator, group, NAN) > 0.98
    assert confidence(calibrator, group, NAN, position=1) > 0.98
    assert confidence(calibrator, group, 0.5) < 0.02
    assert confidence(calibrator, group, 0.0) < 0.02, "it says nothing of low scores"


def test_old_observations_of_the_same_bins_may_count_less() -> None:
    calibrator = Calibrator(1)
    group = calibrator.group("m", is_greedy=False)
    for score in (0.5, 0.9):
        for _ in range(50):
            feed(calibrator, np.full((8, 1), score), np.zeros((8, 1), dtype=bool), group)
    before = calibrator.trials.sum()
    drafts = calibrator.calibrate(np.full((4, 1), 0.9), np.full(4, group))
    for _ in range(8):
        calibrator.observe(drafts, np.ones(4, dtype=np.int64), np.ones(4, dtype=np.int64), most_trials=16)
    assert confidence(calibrator, group, 0.9) > 0.7, "estimates follow at once"
    assert confidence(calibrator, group, 0.5) < 0.02
    assert calibrator.trials[0, 0].max() == pytest.approx(before / 2, rel=0.2), "of other bins, all is kept"
    assert np.sort(calibrator.trials[0, 0])[-2] <= 20


def test_kinds_are_apart() -> None:
    calibrator = Calibrator(1)
    greedy, sampled, other = (calibrator.group(method, is_greedy=is_greedy) for method, is_greedy in (("m", True), ("m", False), ("n", False)))
    assert calibrator.group("m", is_greedy=True) == greedy
    before = confidence(calibrator, other, 0.9)
    for _ in range(50):
        rows = np.array([greedy, sampled] * 4)
        drafts = calibrator.calibrate(np.full((8, 1), 0.9), rows)
        calibrator.observe(drafts, np.ones(8, dtype=np.int64), (rows == greedy).astype(np.int64))
    assert confidence(calibrator, greedy, 0.9) > 0.95
    assert confidence(calibrator, sampled, 0.9) < 0.05
    assert confidence(calibrator, other, 0.9) == before
    assert [(each.method, each.is_greedy, each.num_observed_by_position) for each in calibrator.statistics()] == [
        ("m", True, (200,)),
        ("m", False, (200,)),
    ]
    assert [each.acceptance_by_position for each in calibrator.statistics()] == [(1.0,), (0.0,)]


def test_it_forgets_slowly() -> None:
    calibrator = Calibrator(1)
    group = calibrator.group("m", is_greedy=False)
    for is_accepted, least, most in ((True, 0.98, 1), (False, 0.2, 0.45), (False, 0.05, 0.2)):
        for _ in range(WINDOW // 32):
            feed(calibrator, np.full((32, 1), 0.9), np.full((32, 1), is_accepted), group)
        assert least <= confidence(calibrator, group, 0.9) <= most


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.5, 100)), min_size=1, max_size=12))
def test_isotonic_is_the_closest_non_decreasing_sequence(points: list[tuple[float, float]]) -> None:
    """x_i = max over a <= i of min over b >= i of mean(a..b)."""
    values, weights = (np.array(part) for part in zip(*points, strict=True))
    number = len(values)
    means = {
        (first, last): np.average(values[first : last + 1], weights=weights[first : last + 1])
        for first in range(number)
        for last in range(first, number)
    }
    closest = [max(min(means[first, last] for last in range(index, number)) for first in range(index + 1)) for index in range(number)]
    assert isotonic(values, weights) == pytest.approx(closest, abs=1e-9)
