"""Scores become probabilities by fits that came with the head."""

import math
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.method import Ask
from specwire.engine.heads.calibration import LogisticCalibration
from specwire.errors import InvalidArgumentError
from tests.heads.checkpoints import Checkpoint
from tests.heads.drafting import make_bench
from tests.heads.target import Target
from tests.heads.test_formats import TEXT, changed


def logistic(prob: float, weight: float, bias: float) -> float:
    return 1 / (1 + math.exp(-(weight * math.log(prob / (1 - prob)) + bias)))


def test_each_position_has_its_fit_and_later_ones_the_last() -> None:
    calibration = LogisticCalibration([(1.0, 1.0, 0.0), (0.5, 0.5, -1.0)])
    found = calibration([[0.3, 0.8, 0.6], [], [0.9]])
    assert found == [pytest.approx([0.3, logistic(0.8, 0.5, -1), logistic(0.6, 0.5, -1)]), [], pytest.approx([0.9])]
    assert calibration([]) == []
    [[least, most]] = calibration([[0.0, 1.0]])
    assert 0 < least < most < 1


def test_between_temperatures_the_weights_lie_between() -> None:
    calibration = LogisticCalibration([(1.0, 1.0, 0.0)], {0.5: [(0.5, 1.0, 0.5)], 1.0: [(0.25, 0.5, 0.25)]})
    found = calibration([[0.3]] * 6, [0.0, 0.25, 0.5, 0.75, 1.0, 1.7])
    weights = [(1.0, 1.0, 0.0), (0.75, 1.0, 0.25), (0.5, 1.0, 0.5), (0.375, 0.75, 0.375), (0.25, 0.5, 0.25), (0.25, 0.5, 0.25)]
    expected = [1 / (1 + math.exp(-(a * math.log(0.3) - b * math.log(0.7) + c))) for a, b, c in weights]
    assert found == [[pytest.approx(value)] for value in expected]


@pytest.mark.parametrize(
    ("temperature", "weights"), [(0.0, [0.7, 0.7, 0.2]), (0.4, [0.5, 0.85, 0.1]), (0.8, [0.3, 1.0, 0.0]), (1.3, [0.3, 1.0, 0.0])]
)
def test_a_request_has_the_fit_of_its_temperature(
    target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path, temperature: float, weights: list[float]
) -> None:
    checkpoint = checkpoints["eagle3_speculators"]
    sampled = [{"temperature": 0.8, "weights_by_position": [[0.3, 1.0, 0.0]]}]
    fit = {"input": "log_odds", "weights_by_position": [[0.7, 0.2]], "sampled": sampled}
    folder = changed(checkpoint, tmp_path / "eagle3_fitted", confidence_calibration=fit)
    answers = []
    for one in (checkpoint, Checkpoint(folder, checkpoint.config, checkpoint.tensors)):
        bench = make_bench(target, one)
        bench.begin(0, TEXT, 20, temperature)
        bench.catch_up()
        answers.append(bench.method.propose([Ask(0, 3)])[0])
    raw, fitted = answers
    assert fitted.token_ids == raw.token_ids
    a, b, c = weights
    assert fitted.scores == pytest.approx([1 / (1 + math.exp(-(a * math.log(p) - b * math.log(1 - p) + c))) for p in raw.scores], rel=1e-4)


def test_a_drafter_uses_the_fit_of_its_head(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["eagle3_speculators"]
    fit = {"input": "log_odds", "weights_by_position": [[0.7, 0.2], [0.4, -0.3]]}
    folder = changed(checkpoint, tmp_path / "eagle3_fitted", confidence_calibration=fit)
    answers = []
    for one in (checkpoint, Checkpoint(folder, checkpoint.config, checkpoint.tensors)):
        bench = make_bench(target, one)
        bench.begin(0, TEXT, 20)
        bench.catch_up()
        answers.append(bench.method.propose([Ask(0, 3)])[0])
    raw, fitted = answers
    assert fitted.token_ids == raw.token_ids
    weights = [(0.7, 0.2), (0.4, -0.3), (0.4, -0.3)]
    assert fitted.scores == pytest.approx([logistic(prob, *weight) for prob, weight in zip(raw.scores, weights, strict=True)])


_FIT = {"input": "log_odds", "weights_by_position": [[1, 0]]}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"input": "entropy", "weights_by_position": [[1, 0]]},
        {"input": "log_odds", "weights_by_position": [[1]]},
        _FIT | {"sampled": {}},
        _FIT | {"sampled": [{"weights_by_position": [[1, 0]]}]},
        _FIT | {"sampled": [{"temperature": 0, "weights_by_position": [[1, 0]]}]},
        _FIT | {"sampled": [{"temperature": 0.7, "weights_by_position": [[1, 0], [1, 0]]}]},
        _FIT | {"sampled": [{"temperature": 0.7, "weights_by_position": [[1, 0]]}] * 2},
    ],
)
def test_another_fit_is_refused(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path, value: Any) -> None:
    checkpoint = checkpoints["eagle3_speculators"]
    folder = changed(checkpoint, tmp_path / "eagle3_other", confidence_calibration=value)
    with pytest.raises(InvalidArgumentError, match=r'must be \{"input": "log_odds"'):
        make_bench(target, Checkpoint(folder, checkpoint.config, checkpoint.tensors))
