"""A short fuzz of every stream; `python -m tests.fuzz --minutes 20` is the long one."""

import pytest

from tests.fuzz.run import TARGETS, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_is_sent_is_answered_and_leaves_nothing(name: str) -> None:
    fuzz(name, 25, number=0)
