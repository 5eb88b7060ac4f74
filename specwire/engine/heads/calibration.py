"""From what a head says of its drafts to probabilities of acceptance, by fits that came with it."""

from collections.abc import Sequence

import numpy as np

from specwire.engine.heads.config import HeadConfig
from specwire.errors import InvalidArgumentError

_KEY = "confidence_calibration"
_TINY = 1e-7


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


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -60, 60))))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
