"""What answers repeat, from their tokens."""

import random

import pytest

from specwire.advise.lookup import Repetition, measure_repetition


def test_an_answer_that_copies_its_prompt() -> None:
    prompt = list(range(100))
    found = measure_repetition([(prompt, list(range(10, 60)), 1.0)], 5)
    # The first three tokens have no three tokens of the passage before them.
    assert found.in_prompt == pytest.approx(47 / 50)
    assert (found.in_answer, found.elsewhere) == (0.0, 0.0)
    # One token before there is a match of two, then steps of six.
    assert found.acceptance_length == pytest.approx(1 + 40 / 8, abs=0.3)
    assert found.tokens_per_step == pytest.approx(49 / 9, abs=0.6)


def test_an_answer_that_repeats_itself() -> None:
    found = measure_repetition([([900], [1, 2, 3, 4] * 10, 1.0)], 3)
    assert found.in_prompt == 0.0
    assert found.in_answer == pytest.approx(33 / 40)
    assert found.share == found.in_answer
    assert found.acceptance_length == pytest.approx(4.0, abs=0.3)


def test_answers_that_repeat_each_other() -> None:
    found = measure_repetition([([1], list(range(100, 150)), 1.0), ([2], list(range(100, 150)), 1.0)], 5)
    assert (found.in_prompt, found.in_answer) == (0.0, 0.0)
    assert found.elsewhere == pytest.approx(47 / 50)
    assert found.acceptance_length == found.tokens_per_step == 1.0


def test_weights_count() -> None:
    fresh, copied = ([1, 2], random.Random(0).sample(range(10_000), 40), 3.0), (list(range(50)), list(range(50)), 1.0)
    shares = [measure_repetition([fresh, (copied[0], copied[1], weight)], 5).share for weight in (0.0, 1.0, 3.0)]
    assert shares[0] == 0.0 < shares[1] < shares[2]


def test_nothing_to_go_by() -> None:
    assert measure_repetition([], 5) == Repetition()
    assert measure_repetition([([1, 2], [], 1.0), ([], [3], 1.0)], 5) == Repetition()
