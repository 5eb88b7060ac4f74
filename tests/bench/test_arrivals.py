"""Arrival times are what their names say: tested against the distributions, with a fixed seed."""

import math

import numpy as np
import pytest
from scipy import stats

from specwire.bench.arrivals import arrival_times
from specwire.errors import InvalidArgumentError

COUNT = 20_000


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_arrivals(rate: float, seed: int) -> None:
    """Exponential gaps that do not depend on each other, and Poisson counts: variance = mean in windows of 5 mean gaps."""
    times = np.array(arrival_times(COUNT, rate, 1.0, seed))
    gaps = np.diff(times)
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.001
    assert abs(stats.pearsonr(gaps[:-1], gaps[1:]).statistic) < 4 / math.sqrt(COUNT)
    counts = np.histogram(times, bins=np.arange(0, times[-1] - 5 / rate, 5 / rate))[0]
    assert counts.mean() == pytest.approx(5, rel=0.05)
    assert counts.var() == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_gamma_distributed_gaps(burstiness: float) -> None:
    gaps = np.diff(arrival_times(COUNT, 10.0, burstiness, 0))
    assert stats.kstest(gaps, "gamma", args=(burstiness, 0, 1 / (10.0 * burstiness))).pvalue > 0.001
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert stats.kstest(gaps, "expon", args=(0, 0.1)).pvalue < 1e-9


def test_shape_of_the_schedule() -> None:
    times = arrival_times(100, 5.0, 1.0, 3)
    assert (len(times), times[0]) == (100, 0.0)
    assert times == sorted(times)
    assert times == arrival_times(100, 5.0, 1.0, 3) != arrival_times(100, 5.0, 1.0, 4)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0] * 3
    assert arrival_times(0, 5.0, 1.0, 0) == []
    assert arrival_times(1, 5.0, 1.0, 0) == [0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)])
def test_impossible_rates(rate: float, burstiness: float) -> None:
    with pytest.raises(InvalidArgumentError, match="--request-rate is" if burstiness == 1.0 else "--burstiness is"):
        arrival_times(5, rate, burstiness, 0)
