"""Distributions of measured values, and limits on them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specwire.bench.record import RequestRecord
from specwire.errors import InvalidArgumentError

DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `count` values: std over all of them (not a sample's), percentiles interpolated linearly, as numpy does and `vllm bench serve` reports."""

    count: int
    mean: float
    median: float
    std: float
    max: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> "Distribution | None":
        """None of no values: there is no mean, and 0 would be a lie."""
        if not values:
            return None
        array = np.asarray(values, dtype=np.float64)
        points = np.percentile(array, percentiles)
        return cls(
            len(values), float(array.mean()), float(np.median(array)), float(array.std()), float(array.max()),
            tuple((percentile, float(point)) for percentile, point in zip(percentiles, points, strict=True)),
        )  # fmt: skip


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`50,90,99.9`, ascending. Raises InvalidArgumentError."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise InvalidArgumentError(f"--percentiles is {text!r}, but must be numbers with commas between them, such as 50,90,99") from None
    if not all(0 <= value <= 100 for value in values):
        raise InvalidArgumentError(f"--percentiles is {text!r}, but each must be from 0 to 100")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Objective:
    """A service-level objective: most milliseconds of TTFT, TPOT and E2E latency; None = any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Objective | None":
        """From `ttft:200 tpot:50 e2el:3000`, in one string or several; None if there is nothing in them. Raises InvalidArgumentError."""
        limits: dict[str, float] = {}
        for part in (part for text in texts for part in re.split(r"[\s,]+", text) if part):
            name, _, number = part.partition(":")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if name not in ("ttft", "tpot", "e2el") or not value >= 0:
                raise InvalidArgumentError(f"--goodput has {part!r}, but must be ttft, tpot or e2el with milliseconds, such as ttft:200")
            if f"{name}_ms" in limits:
                raise InvalidArgumentError(f"--goodput has {name} twice; give one limit for each")
            limits[f"{name}_ms"] = value
        return cls(**limits) if limits else None

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request that succeeded meets all limits; the TPOT of an answer of one token counts as 0."""
        values = ((self.ttft_ms, record.ttft_s), (self.tpot_ms, record.tpot_s or 0.0), (self.e2el_ms, record.e2el_s))
        return all(limit is None or 1000 * value <= limit for limit, value in values)
