"""Fits of drafts that share the noise of sampled answers."""

import numpy as np
import pytest
import torch

from specwire.train import sampled
from specwire.train.batches import BatchSource
from specwire.train.calibration import sigmoid
from specwire.train.data import Job
from specwire.train.deadline import Deadline
from specwire.train.heads import Head, make_head
from specwire.train.sampled import Sampled, choose_sharpness, fit_sampled
from specwire.train.target import Target
from tests.train.conftest import small


def test_weights_are_those_that_outcomes_were_drawn_from() -> None:
    rng, weights = np.random.default_rng(0), np.array([[0.3, 0.8, -0.4], [0.2, 1.1, 0.1]])
    count = 60_000
    position, log_odds = rng.integers(0, 2, count), rng.normal(0, 3, count)
    chosen = weights[position]
    probs = sigmoid(chosen[:, 0] * np.log(sigmoid(log_odds)) - chosen[:, 1] * np.log(sigmoid(-log_odds)) + chosen[:, 2])
    signals = np.stack((log_odds, log_odds, log_odds), -1)
    fit = sampled._fit(np.column_stack((np.arange(count), position, signals, rng.random(count) < probs)), 0.7, 2)
    np.testing.assert_allclose(fit.weights_by_position, weights, atol=0.1)
    assert fit.num_drafts == count // 2
    assert fit.calibration_error is not None
    assert fit.calibration_error < 0.01


def test_each_temperature_has_a_fit_or_none(target: Target, source: BatchSource, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(small("eagle3"), target, 3, None)
    assert isinstance(head, Head)
    rng = np.random.default_rng(2)
    jobs = [Job(rng.integers(0, 256, 4 + index).tolist(), 0.0, is_held_out=index > 0) for index in range(6)]
    assert fit_sampled(head, target, jobs, (1, 2, 3), 4, 12, (0.7, 1.0), Deadline(0)) == Sampled()
    monkeypatch.setattr(sampled, "_MIN_DRAFTS", 10)
    with torch.no_grad():
        found = fit_sampled(head, target, jobs, (1, 2, 3), 4, 12, (0.7, 1.0), Deadline(0))
    assert [fit.temperature for fit in found.fits] == [0.7, 1.0]
    assert all(np.shape(fit.weights_by_position) == (4, 3) for fit in found.fits)
    assert found.sharpness in sampled.FACTORS


def outcomes(accepted: np.ndarray) -> np.ndarray:
    """Observations of steps of one draft each, in answers of ten steps."""
    zeros = np.zeros(len(accepted))
    return np.column_stack((np.arange(len(accepted)) // 10, zeros, zeros, zeros, zeros, accepted))


def test_the_factor_that_pays_is_chosen() -> None:
    rng = np.random.default_rng(0)
    even = np.arange(20_000) // 10 % 2 == 0

    def drawn(rate: float | np.ndarray) -> list[np.ndarray]:
        return [outcomes(rng.random(20_000) < rate), outcomes(rng.random(20_000) < rate)]

    chosen, gain = choose_sharpness({1.0: drawn(0.3), 1.2: drawn(0.4), 1.45: drawn(0.35)})
    assert chosen == 1.2
    assert gain == pytest.approx(1.4 / 1.3 - 1, abs=0.02)
    assert choose_sharpness({1.0: drawn(0.3), 1.2: drawn(0.301)})[0] == 1.0, "too little"
    # What is better only on the half that it is chosen by is nothing.
    assert choose_sharpness({1.0: drawn(0.3), 1.2: drawn(np.where(even, 0.5, 0.3))}) == (1.0, 0.0)
