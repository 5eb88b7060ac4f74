"""Which places at a drafter are asked first, and which are in step."""

from unittest.mock import Mock

import pytest

from coordinator.draft_slot import DraftSlot, least_judged


def place(index: int, *, is_usable: bool = True, num_tokens: int = 10) -> DraftSlot:
    made = DraftSlot(Mock(is_usable=is_usable), index, 1, Mock(token_ids=[7] * num_tokens))
    made.is_open, made.num_sent_tokens = True, 10
    return made


def test_those_judged_least_lately_come_first_and_those_that_catch_up_last() -> None:
    """One that catches up for long is never judged: a probe that asked it first again and again would show nothing."""
    places = [place(index) for index in range(4)]
    for each, step in zip(places, (9, 7, 0, 8), strict=True):
        each.graded_step = step
    assert least_judged(places, 2) == [places[2], places[1]]
    places[2].wait(20)
    assert least_judged(places, 2) == [places[1], places[3]]
    assert least_judged(places, 9) == [places[1], places[3], places[0], places[2]], "where nobody else is there, it is asked, too"


@pytest.mark.parametrize(("is_usable", "num_tokens", "is_in_step"), [(True, 10, True), (True, 42, True), (True, 43, False), (False, 10, False)])
def test_in_step_is_what_can_be_asked_and_knows_nearly_all(is_usable: bool, num_tokens: int, is_in_step: bool) -> None:
    made = place(0, is_usable=is_usable, num_tokens=num_tokens)
    assert made.is_in_step is is_in_step
    made.is_open = False
    assert not made.is_in_step
