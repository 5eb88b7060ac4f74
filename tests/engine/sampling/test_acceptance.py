"""Rates of synthetic acceptance."""

import pytest

from specwire.engine.sampling.acceptance import check_rates, conditional_rates, rates_from_length, rates_from_mean_rate
from specwire.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("length", "num_speculative_tokens", "expected"),
    [
        (2.6, 3, (1, 0.6, 0)),
        (1, 3, (0, 0, 0)),
        (4, 3, (1, 1, 1)),
        (2, 3, (1, 0, 0)),
        (3.5, 4, (1, 1, 0.5, 0)),
        (1.875, 3, (0.875, 0, 0)),
        (1.5, 1, (0.5,)),
    ],
)
def test_rates_from_length(length: float, num_speculative_tokens: int, expected: tuple[float, ...]) -> None:
    rates = rates_from_length(length, num_speculative_tokens)
    assert rates == pytest.approx(expected)
    assert 1 + sum(rates) == pytest.approx(length)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((0.9, 0.5, 0.2), (0.9, 0.5556, 0.4)), ((1, 0.6, 0, 0), (1, 0.6, 0, 0)), ((), ()), ((0.7,), (0.7,)), ((0.0, 0.0), (0.0, 0.0))],
)
def test_conditional_rates(rates: tuple[float, ...], expected: tuple[float, ...]) -> None:
    assert conditional_rates(rates) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.64, 0.999, 1.0])
@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 8])
def test_rates_from_mean_rate(rate: float, num_speculative_tokens: int) -> None:
    rates = rates_from_mean_rate(rate, num_speculative_tokens)
    assert sum(rates) / num_speculative_tokens == pytest.approx(rate, abs=1e-12)
    assert conditional_rates(rates) == pytest.approx([rates[0]] * num_speculative_tokens)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ((0.5, -0.1), r"\[1\] is -0.1, but entries must be in \[0, 1\]"),
        ((1.5,), r"\[0\] is 1.5, but entries must be in \[0, 1\]"),
        ((float("nan"),), "is nan"),
        ((0.5, 0.6), r"\[1\] is 0.6 after 0.5, but the rates must be non-increasing"),
    ],
)
def test_bad_rates(rates: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_rates(rates)


@pytest.mark.parametrize("length", [0.99, 4.01, float("nan")])
def test_bad_lengths(length: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be in \[1, 4\]"):
        rates_from_length(length, 3)


@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan")])
def test_bad_mean_rates(rate: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be in \[0, 1\]"):
        rates_from_mean_rate(rate, 3)
