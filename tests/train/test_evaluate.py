"""Walks through answers and calibration, by hand-made cases and against what was drawn."""

import numpy as np
import pytest
import torch

from specwire.train.batches import Batch, BatchSource
from specwire.train.calibration import area_under_curve, calibration_error, fit_logistic, sigmoid
from specwire.train.deadline import Deadline
from specwire.train.evaluate import evaluate
from specwire.train.modules import Drafted, Pairs
from specwire.train.target import Target


class Oracle:
    """Drafts the answer itself, but a wrong token at every position of which the number is in `wrong`, with log-odds that tell it or not."""

    bias_head = None

    def __init__(self, wrong: set[int], num_drafts: int = 4) -> None:
        self._wrong, self._num_drafts = wrong, num_drafts

    def start(self, batch: Batch) -> None:
        raise NotImplementedError

    def pairs(self, batch: Batch, generator: torch.Generator | None = None) -> Pairs:
        raise NotImplementedError

    def drafts(self, batch: Batch) -> Drafted:
        length = batch.tokens.shape[1]
        places = torch.arange(length)[:, None] + 1 + torch.arange(self._num_drafts)
        tokens = batch.tokens[:, places.clamp_max(length - 1)].clone()
        is_wrong = torch.isin(places, torch.tensor(sorted(self._wrong), dtype=torch.int64)).expand_as(tokens)
        tokens[is_wrong] = -5
        log_odds = torch.where(is_wrong, -1.0, 1.0)[..., None]
        return Drafted(tokens, log_odds.expand(*log_odds.shape[:-1], 3).float())


def expected_steps(first: int, last: int, wrong: set[int], num_drafts: int = 4) -> int:
    steps = 0
    while first < last:
        accepted = 0
        while accepted < num_drafts and first + accepted + 1 <= last and first + accepted + 1 not in wrong:
            accepted += 1
        first += accepted + 1
        steps += 1
    return steps


@pytest.mark.parametrize("wrong", [set(), set(range(0, 200, 2)), set(range(0, 200, 3)), set(range(200))])
def test_walks_take_as_many_steps_as_a_server(wrong: set[int], target: Target, source: BatchSource) -> None:
    sequences = source.sequences
    result = evaluate(Oracle(wrong), target, source, 4, Deadline(0))
    for walk, is_greedy in ((result.greedy, True), (result.sampled, False)):
        rows = np.flatnonzero(sequences.is_held_out & (sequences.is_greedy == is_greedy))
        bounds = [(int(sequences.prompt_lens[row]), int(sequences.lengths[row]) - 1) for row in rows]
        assert walk.num_sequences == len(rows)
        assert walk.num_steps == sum(expected_steps(*bound, wrong) for bound in bounds)
        assert walk.num_tokens == sum(last - first for first, last in bounds)
        assert walk.acceptance_length == pytest.approx(walk.num_tokens / max(walk.num_steps, 1), abs=1e-3)
        assert walk.acceptance_by_position == sorted(walk.acceptance_by_position, reverse=True)
    # Of two greedy answers, one is fitted and the other measured.
    assert result.raw_calibration_error is not None
    if not wrong:
        assert result.greedy.acceptance_by_position[0] > 0.6


def test_a_fit_finds_the_curve_that_outcomes_were_drawn_from() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(0, 2, (20_000, 2))
    accepted = (rng.random(len(inputs)) < sigmoid(inputs @ [0.7, -0.3] + 0.4)).astype(float)
    weights = fit_logistic(inputs, accepted)
    assert weights == pytest.approx([0.7, -0.3, 0.4], abs=0.06)
    predicted = sigmoid(inputs @ weights[:2] + weights[2])
    assert calibration_error(predicted, accepted) < 0.02
    assert calibration_error(sigmoid(3 * inputs[:, 0]), accepted) > 0.1


def test_fits_of_outcomes_that_are_all_equal_stay_finite() -> None:
    weights = fit_logistic(np.linspace(-1, 1, 50)[:, None], np.ones(50))
    assert np.isfinite(weights).all()
    assert sigmoid(weights[1]) > 0.95
    assert fit_logistic(np.zeros((0, 1)), np.zeros(0)).tolist() == [0, 0]


def test_calibration_error_by_hand() -> None:
    predicted, accepted = np.array([0.05, 0.05, 0.95, 0.95, 1.0]), np.array([0, 1, 1, 1, 0])
    assert calibration_error(predicted, accepted) == pytest.approx((abs(0.1 - 1) + abs(2.9 - 2)) / 5)
    assert calibration_error(predicted[:0], accepted[:0]) is None


def test_area_under_curve_by_hand() -> None:
    assert area_under_curve(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == 0.75
    assert area_under_curve(np.array([0.5, 0.5]), np.array([0, 1])) == 0.5
    assert area_under_curve(np.array([0.5, 0.5]), np.array([1, 1])) is None
