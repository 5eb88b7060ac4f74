"""From what a head says of its drafts to probabilities of acceptance, by fits that came with it."""

from collections.abc import Mapping, Sequence

import numpy as np

from specwire.engine.heads.config import HeadConfig
from specwire.errors import InvalidArgumentError

_KEY = "confidence_calibration"
_TINY = 1e-7
_MOST_KEPT = 256
"""Temperatures whose weights are remembered."""
_FORM = (
    '{"input": "log_odds", "weights_by_position": [[weight, bias], ...], "sampled": [{"temperature": 0.7, "weights_by_position": ...}, ...]}, '
    "sampled optional, its temperatures rising from above 0, all with as many positions of two or three numbers"
)

Weights = Sequence[tuple[float, float, float]]
"""(weight of ln p, weight of -ln(1 - p), bias) by position."""


class LogisticCalibration:
    """P(accepted, if all drafts before are) = sigmoid(a ln p - b ln(1 - p) + c), of a draft's probability p, by position and temperature.

    With a = b that is a weight of the log-odds. Above temperature 0 the two differ (beta calibration, Kull et al. 2017): shared noise accepts
    unlikely drafts far more often than their probabilities say. Weights of temperatures between two that were fitted lie between theirs; above
    the highest its own hold.

    Args:
        weights: of greedy requests; positions behind the last have its.
        sampled: by temperature, each with as many positions; empty = the greedy ones hold for all.
    """

    def __init__(self, weights: Weights, sampled: Mapping[float, Weights] | None = None) -> None:
        fits = {0.0: weights, **(sampled or {})}
        self._temperatures = sorted(fits)
        assert weights, "no weights"
        assert self._temperatures[0] == 0, f"temperatures {self._temperatures}"
        self._fits = np.asarray([fits[temperature] for temperature in self._temperatures], dtype=np.float64)  # [temperatures, positions, 3]
        self._by_temperature: dict[float, np.ndarray] = {}

    def __call__(self, probs: Sequence[Sequence[float]], temperatures: Sequence[float] | None = None) -> list[list[float]]:
        """Of drafts of several sequences, each from its first one on.

        Args:
            temperatures: of the sequences; None = all are greedy.
        """
        if not probs:
            return []
        lengths = [len(row) for row in probs]
        flat = np.fromiter((prob for row in probs for prob in row), dtype=np.float64, count=sum(lengths)).clip(_TINY, 1 - _TINY)
        last = self._fits.shape[1] - 1
        chosen = np.concatenate(
            [
                self._weights(temperature)[np.minimum(np.arange(length), last)]
                for length, temperature in zip(lengths, temperatures or [0.0] * len(lengths), strict=True)
            ]
        )
        calibrated = _sigmoid(chosen[:, 0] * np.log(flat) - chosen[:, 1] * np.log1p(-flat) + chosen[:, 2])
        return [part.tolist() for part in np.split(calibrated, np.cumsum(lengths)[:-1])]

    def _weights(self, temperature: float) -> np.ndarray:
        """[positions, 3]"""
        known = self._by_temperature.get(temperature)
        if known is None:
            if len(self._by_temperature) >= _MOST_KEPT:
                self._by_temperature.clear()
            place = float(np.interp(temperature, self._temperatures, np.arange(len(self._temperatures))))
            below = int(place)
            above = min(below + 1, len(self._fits) - 1)
            known = self._fits[below] + (place - below) * (self._fits[above] - self._fits[below])
            self._by_temperature[temperature] = known
        return known


def read_calibration(config: HeadConfig) -> LogisticCalibration | None:
    """What config.json has under confidence_calibration: {"input": "log_odds", "weights_by_position": [[weight, bias], ...]} for greedy requests
    and under "sampled" a list of {"temperature", "weights_by_position"} for others.

    Raises:
        InvalidArgumentError: something else.
    """
    raw = config.options.get(_KEY)
    if raw is None:
        return None
    weights = _read_weights(raw) if isinstance(raw, dict) and raw.get("input") == "log_odds" else None
    sampled = raw.get("sampled", []) if weights is not None else None
    if weights is None or not isinstance(sampled, list):
        raise _wrong(config, raw)
    fits: dict[float, Weights] = {}
    for fit in sampled:
        its, temperature = _read_weights(fit), fit.get("temperature") if isinstance(fit, dict) else None
        if its is None or len(its) != len(weights) or not isinstance(temperature, (int, float)) or not temperature > max(fits, default=0.0):
            raise _wrong(config, raw)
        fits[float(temperature)] = its
    return LogisticCalibration(weights, fits)


def _read_weights(raw: object) -> list[tuple[float, float, float]] | None:
    """Of two numbers the first is the weight of the log-odds."""
    rows = raw.get("weights_by_position") if isinstance(raw, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and len(row) in (2, 3) and all(map(_is_number, row)) for row in rows):
        return None
    return [(float(row[0]), float(row[-2]), float(row[-1])) for row in rows]


def _wrong(config: HeadConfig, raw: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{config.name}: {_KEY} is {raw!r}, but must be {_FORM}; remove it")


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -60, 60))))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
