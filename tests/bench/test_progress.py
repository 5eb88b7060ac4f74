"""The progress bar: on a terminal's standard error only."""

import io

import pytest
from rich.console import Console

from specwire.bench import progress
from specwire.bench.record import INTERRUPTED, RequestRecord


def run(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> str:
    output = io.StringIO()

    def make_console(*, stderr: bool) -> Console:
        assert stderr
        return Console(file=output, force_terminal=is_terminal, width=100, color_system=None)

    monkeypatch.setattr(progress, "Console", make_console)
    with progress.show_progress("requests", 3) as ended:
        for error in ("", "InternalError", INTERRUPTED):
            ended(RequestRecord(0, 1, 0.0, 0.0, error=error))
    return output.getvalue()


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = run(monkeypatch, True)
    assert "requests" in text
    assert "3/3" in text
    assert "1 failed" in text


def test_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, False) == ""
