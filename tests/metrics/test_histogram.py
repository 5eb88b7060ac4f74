"""Histograms: bounds, whole numbers, observations by parts."""

import math

import pytest

from specwire.metrics import NUM_TOKENS_BOUNDS, Histogram, Kind, Metric
from tests.metrics.scrape import series_of


def test_a_value_that_equals_a_bound_is_below_it() -> None:
    histogram = Histogram((1, 10, 100), unit=1)
    for value in (0, 1, 2, 10, 11, 100, 101, 5000):
        histogram.observe(value)
    assert histogram.buckets() == [(1.0, 2), (10.0, 4), (100.0, 6), (math.inf, 8)]
    assert (histogram.count, histogram.sum) == (8, 5225.0)


def test_nanoseconds_are_shown_as_seconds_without_rounding() -> None:
    histogram = Histogram((1_000_000,))
    for _ in range(10):
        histogram.observe(100_000_000_000_000_001)
    assert histogram.sum == 1_000_000_000_000_000_010 / 1e9
    assert histogram.buckets() == [(0.001, 0), (math.inf, 10)]


@pytest.mark.parametrize(("total", "num_parts", "bucket"), [(30, 3, 10), (31, 3, 20), (60, 3, 20), (61, 3, math.inf), (10, 1, 10), (0, 4, 10)])
def test_parts_are_observations_of_equal_size(total: int, num_parts: int, bucket: float) -> None:
    histogram = Histogram((10, 20), unit=1)
    histogram.observe_parts(total, num_parts, times=5)
    assert (histogram.count, histogram.sum) == (5 * num_parts, 5.0 * total)
    assert next(bound for bound, count in histogram.buckets() if count) == bucket


def test_nothing_observed_is_zero_everywhere() -> None:
    histogram = Histogram(NUM_TOKENS_BOUNDS)
    assert (histogram.count, histogram.sum) == (0, 0.0)
    assert {count for _, count in histogram.buckets()} == {0}


def test_bounds_must_ascend() -> None:
    with pytest.raises(AssertionError, match="ascend"):
        Histogram((1, 1))


def test_a_name_says_whether_it_is_a_counter() -> None:
    with pytest.raises(AssertionError, match="_total"):
        Metric("specwire_verifier_rounds", Kind.COUNTER, "rounds")
    assert series_of(Metric("a_seconds", Kind.HISTOGRAM, "")) == ("a_seconds_bucket", "a_seconds_sum", "a_seconds_count")
