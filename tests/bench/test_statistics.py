"""Distributions and limits."""

import numpy as np
import pytest

from specwire.bench.statistics import Distribution, Objective, parse_percentiles
from specwire.errors import InvalidArgumentError


def by_rank(values: list[float], percentile: float) -> float:
    """The textbook's linear interpolation between the values at the ranks around percentile / 100 x (n - 1)."""
    ordered, rank = sorted(values), percentile / 100 * (len(values) - 1)
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999])
def test_percentiles_are_those_of_numpy_and_of_the_textbook(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count).tolist()
    percentiles = (0, 1, 50, 90, 99, 99.9, 100)
    distribution = Distribution.of(values, percentiles)
    assert distribution is not None
    for percentile, value in distribution.percentiles:
        assert value == pytest.approx(by_rank(values, percentile), rel=1e-12)
        assert value == np.percentile(values, percentile)
    assert (distribution.mean, distribution.median, distribution.std) == (np.mean(values), np.median(values), np.std(values))
    assert (distribution.count, distribution.max) == (count, max(values))


def test_no_values_have_no_distribution() -> None:
    assert Distribution.of([], (50,)) is None


def test_parsing_percentiles() -> None:
    assert parse_percentiles("99.9, 50,50") == (50.0, 99.9)
    for text in ("", "a", "50,101", "-1", "nan"):
        with pytest.raises(InvalidArgumentError, match="--percentiles"):
            parse_percentiles(text)


def test_parsing_objectives() -> None:
    assert Objective.parse(["ttft:200 tpot:50", "e2el:3000.5"]) == Objective(200, 50, 3000.5)
    assert Objective.parse(["tpot:0,ttft:1"]) == Objective(1, 0)
    assert Objective.parse([]) is Objective.parse([" "]) is None
    for text in ("itl:5", "ttft", "ttft:", "ttft:-1", "ttft:fast", "ttft:nan", "ttft:1 ttft:2"):
        with pytest.raises(InvalidArgumentError, match="--goodput has"):
            Objective.parse([text])
