"""Loops at the end of answers."""

import numpy as np
import pytest

from specwire.train.loops import length_without_loop


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (list(range(100)), 100),
        ([1, 2, 3] + [7] * 30, 5),
        ([1, 2, 3] + [7, 8] * 15, 7),
        ([1, 2, 3] + [7, 8] * 15 + [7], 7),
        ([1, 2, 3] + [7] * 10, 13),  # too short to be one
        ([*range(50), *range(200, 230), *range(200, 230), *range(200, 230)], 110),
        ([*range(50), *range(200, 230), *range(200, 230)], 110),  # said twice, but not again
        ([7] * 30 + [1, 2, 3], 33),  # it ended by itself
        ([], 0),
        ([1], 1),
    ],
)
def test_two_rounds_are_left_of_a_loop(tokens: list[int], expected: int) -> None:
    assert length_without_loop(np.array(tokens, dtype=np.int64)) == expected
