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
from specwire.train.sampled import fit_sampled
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
    assert fit_sampled(head, target, jobs, (1, 2, 3), 4, 12, (0.7, 1.0), Deadline(0)) == []
    monkeypatch.setattr(sampled, "_MIN_DRAFTS", 10)
    with torch.no_grad():
        fits = fit_sampled(head, target, jobs, (1, 2, 3), 4, 12, (0.7, 1.0), Deadline(0))
    assert [fit.temperature for fit in fits] == [0.7, 1.0]
    assert all(np.shape(fit.weights_by_position) == (4, 3) for fit in fits)
