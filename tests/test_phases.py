"""Phases of a start: what the line says."""

import logging
import threading

import pytest

from specwire.phases import Phases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_add_up_to_the_total(clock: Clock) -> None:
    phases = Phases(clock)
    for name, seconds in (("import", 2.5), ("weights", 1.0), ("capture", 0.01), ("weights", 0.25)):
        with phases.phase(name):
            clock.now += seconds
        clock.now += 0.1
    assert str(phases) == "4.2 s (import 2.5 s, weights 1.2 s, other 0.4 s)"


def test_a_start_without_phases(clock: Clock) -> None:
    assert str(Phases(clock)) == "0.0 s"


def test_only_long_phases_get_a_line_of_their_own(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    phases = Phases(clock)
    with phases.phase("files"):
        clock.now += 1.0

    def break_late() -> None:
        clock.now += 60.0
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), phases.phase("weights"):
        break_late()
    assert [record.getMessage() for record in caplog.records] == ["weights: 60.0 s"]
    assert "weights 60.0 s" in str(phases), "one that fails counts, too"


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("import", "; Python reads its libraries, which takes long where the disk is slow or the machine is busy"),
        ("files", "; a first start fetches and converts files, and keeps them"),
        ("profile", "; the costs of rounds are measured; a first start compiles code for this machine, and keeps it"),
        ("KV cache", ""),
    ],
)
def test_a_slow_phase_says_so_while_it_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, because: str) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("specwire.phases._SLOW_S", 0.01)
    said, lines = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            said.set()

    listener = Listener()
    logging.getLogger("specwire.phases").addHandler(listener)
    try:
        with Phases().phase(name):
            assert said.wait(30)
        assert lines == [f"{name}: not done after 0 s{because}"]
    finally:
        logging.getLogger("specwire.phases").removeHandler(listener)
    said.clear()
    with Phases().phase("files"):
        pass
    assert not said.wait(0.1), "one that has ended says nothing more"
