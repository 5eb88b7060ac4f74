"""The benchmark of the two choices runs, and they take microseconds, not milliseconds."""

import pytest

from benchmarks.overhead_policy import measure


def test_the_choices_of_a_large_step_are_quick() -> None:
    """The best of many calls, far above what is promised: a machine that is busy must not fail it."""
    times = measure(256, 7, 200)
    assert times["both"][0] == pytest.approx(times["choose_request"][0] + times["choose_kept"][0], abs=0.02)
    assert 0 < times["both"][0] < 1000
    assert 0 < times["observe"][0] < 3000
