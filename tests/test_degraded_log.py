"""Warnings that do not flood the log, and do not fill the memory where peers come and go."""

import logging

import pytest

from specwire import degraded_log
from specwire.degraded_log import DegradedLog


def test_one_warning_a_period_and_then_how_many_more(caplog: pytest.LogCaptureFixture) -> None:
    log = DegradedLog(logging.getLogger("test"), period_s=3600)
    for number in range(3):
        log.warning("a", "a happened to %d", number)
    log.warning("b", "b happened")
    log._last["a"] -= 3600
    log.warning("a", "a happened to %d", 7)
    assert [record.getMessage() for record in caplog.records] == ["a happened to 0", "b happened", "a happened to 7 (and 2 more like it)"]


def test_causes_that_are_long_past_are_forgotten(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(degraded_log, "_MAX_CAUSES", 10)
    log = DegradedLog(logging.getLogger("test"), period_s=3600)
    for number in range(9):
        log.warning(f"lost {number}", "lost %d", number)
        log.warning(f"lost {number}", "lost %d", number)
        log._last[f"lost {number}"] -= 3600
    log.warning("recent", "recent")
    log.warning("recent", "recent")
    log.warning("lost 3", "lost %d", 3)
    assert set(log._last) == {"recent", "lost 3"}
    assert dict(log._num_left_out) == {"recent": 1}
    assert caplog.records[-1].getMessage() == "lost 3 (and 1 more like it)"
