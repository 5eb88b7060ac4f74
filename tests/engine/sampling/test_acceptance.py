"""When a draft is accepted."""

import pytest

from specwire.engine.sampling.acceptance import conditional_rates, is_accepted


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((0.9, 0.5, 0.2), (0.9, 0.5556, 0.4)), ((1, 0.6, 0, 0), (1, 0.6, 0, 0)), ((), ()), ((0.7,), (0.7,)), ((0.0, 0.0), (0.0, 0.0))],
)
def test_conditional_rates(rates: tuple[float, ...], expected: tuple[float, ...]) -> None:
    assert conditional_rates(rates) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rates", [(0.5, -0.1), (1.5,), (0.5, 0.6), (float("nan"),)])
def test_rates_that_nobody_checked(rates: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError, match="are not falling within"):
        conditional_rates(rates)


def test_strict_looks_only_at_the_tokens() -> None:
    assert is_accepted(4, 4, 0, None, 0.999)
    assert not is_accepted(4, 5, 0, None, 0.001)


@pytest.mark.parametrize(
    ("position", "draw", "expected"), [(0, 0.49, True), (0, 0.5, False), (1, 1 - 2**-33, True), (2, 2**-33, False), (3, 2**-33, False)]
)
def test_synthetic_looks_only_at_the_draw(position: int, draw: float, expected: bool) -> None:
    for target_id in (4, 5):
        assert is_accepted(4, target_id, position, (0.5, 1.0, 0.0), draw) == expected
