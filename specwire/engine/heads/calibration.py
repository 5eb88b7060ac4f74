"""From what a head says of its drafts to probabilities of acceptance, by fits that came with it."""

from collections.abc import Sequence

import numpy as np

from specwire.engine.heads.config import HeadConfig
from specwire.errors import InvalidArgumentError

_KEY = "confidence_calibration"
_TINY = 1e-7
_GRID = np.geomspace(0.2, 5.0, 129)
"""Temperatures that are tried: a ratio of 1.025 from one to the next."""
_NUM_BINS = 10


class LogisticCalibration:
    """P(accepted, if all drafts before are) = sigmoid(weight x log-odds of the draft's probability + bias), by position.

    Args:
        weights: (weight, bias) by position; positions behind the last have its.
    """

    def __init__(self, weights: Sequence[tuple[float, float]]) -> None:
        assert weights, "no weights"
        self._weights = np.asarray(weights, dtype=np.float64)

    def __call__(self, probs: Sequence[Sequence[float]]) -> list[list[float]]:
        """Of drafts of several sequences, each from its first one on."""
        if not probs:
            return []
        lengths = [len(row) for row in probs]
        flat = np.fromiter((prob for row in probs for prob in row), dtype=np.float64, count=sum(lengths)).clip(_TINY, 1 - _TINY)
        positions = np.concatenate([np.arange(length) for length in lengths])
        chosen = self._weights[np.minimum(positions, len(self._weights) - 1)]
        calibrated = _sigmoid(chosen[:, 0] * np.log(flat / (1 - flat)) + chosen[:, 1])
        return [part.tolist() for part in np.split(calibrated, np.cumsum(lengths)[:-1])]


def read_calibration(config: HeadConfig) -> LogisticCalibration | None:
    """What config.json has under confidence_calibration: {"input": "log_odds", "weights_by_position": [[weight, bias], ...]}.

    Raises:
        InvalidArgumentError: something else.
    """
    raw = config.options.get(_KEY)
    if raw is None:
        return None
    rows = raw.get("weights_by_position") if isinstance(raw, dict) and raw.get("input") == "log_odds" else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and len(row) == 2 and all(map(_is_number, row)) for row in rows):
        raise InvalidArgumentError(
            f'{config.name}: {_KEY} is {raw!r}, but must be {{"input": "log_odds", "weights_by_position": [[weight, bias], ...]}}; remove it'
        )
    return LogisticCalibration([(float(weight), float(bias)) for weight, bias in rows])


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> list[float]:
    """Sequential temperature scaling (DSpark, https://arxiv.org/abs/2607.05147): for each position, from the first on, the temperature with
    which the product of the confidences so far is the best calibrated.

    Args:
        logits: [N, K] of a confidence head, for N drafts of K tokens.
        accepted: [N, K] bool, whether the draft's first i + 1 tokens were all accepted.

    Returns:
        K temperatures, what `confidence_temperatures` in config.json holds.
    """
    assert logits.shape == accepted.shape, f"{logits.shape} logits for {accepted.shape} outcomes"
    temperatures: list[float] = []
    survival = np.ones(len(logits))
    for position in range(logits.shape[1]):
        tried = survival * _sigmoid(logits[:, position] / _GRID[:, None])  # [grid, N]
        outcome = accepted[:, position].astype(np.float64)
        best = int(np.argmin([_calibration_error(predicted, outcome) for predicted in tried]))
        temperatures.append(float(_GRID[best]))
        survival = tried[best]
    return temperatures


def _calibration_error(predicted: np.ndarray, outcome: np.ndarray) -> float:
    """Mean of |predicted - observed| over ten bins of equal width, weighted by what is in them."""
    bins = np.minimum((predicted * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, predicted - outcome, _NUM_BINS)).sum() / len(predicted))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -60, 60))))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
