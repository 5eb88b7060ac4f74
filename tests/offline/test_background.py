"""How the services of an LLM begin and end, with services that are only healthy."""

import asyncio
import gc
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from rich.console import Console

from specwire import LLM, FailedPreconditionError, UnavailableError
from specwire.errors import SpecwireError
from specwire.offline.waiting import wait_with_notices
from tests.cli.test_launch import happened, is_alive
from tests.waiting import until

FAKES = Path(__file__).parents[1] / "cli" / "fakes"
TIMEOUT_S = 60.0
KINDS = {"verifier", "drafter", "coordinator"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, socket_dir: Path) -> Path:
    """Where the fake services note their starts and stops."""
    path = tmp_path / "events"
    path.touch()
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.chdir(tmp_path)  # `python -m` looks there first
    monkeypatch.setenv("FAKE_EVENTS", str(path))
    monkeypatch.setenv("TMPDIR", str(socket_dir))
    monkeypatch.setattr("tempfile.tempdir", str(socket_dir))
    return path


def check_gone(events: Path, socket_dir: Path) -> None:
    """All three were started, were told to stop, and left nothing behind."""
    assert {kind for kind, _ in happened(events, "start")} == {kind for kind, _ in happened(events, "stop")} == KINDS
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]
    assert not list(socket_dir.iterdir())


def test_a_block_and_what_comes_after_it(events: Path, socket_dir: Path) -> None:
    llm = LLM()
    assert set(llm.pids) == KINDS
    with pytest.raises(ZeroDivisionError), llm:
        _ = 1 / 0
    check_gone(events, socket_dir)
    llm.close()
    assert llm.pids == {}
    for call in (lambda: llm.generate("a"), llm.get_metrics, llm.get_tokenizer):
        with pytest.raises(FailedPreconditionError, match="the services were stopped"):
            call()


def test_one_that_is_forgotten(events: Path, socket_dir: Path) -> None:
    llm = LLM()
    assert len(happened(events, "start")) == 3
    del llm
    gc.collect()
    check_gone(events, socket_dir)


def test_a_service_that_ends_at_its_start(events: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRAFTER", json.dumps({"status": 3, "line": "there is no room"}))
    with pytest.raises(UnavailableError, match=r"drafter ended with status 3(.|\n)*drafter +\| there is no room"):
        LLM()
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]
    assert not list(socket_dir.iterdir())


def test_a_start_that_takes_long_says_what_it_waits_for(events: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("specwire.offline.waiting._FIRST_NOTICE_S", 0.01)
    with caplog.at_level(logging.INFO, "specwire.offline.waiting"), LLM():
        lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("starting for 0.01 s: waiting for the ")
    assert any("waiting for the verifier" in line for line in lines)
    assert re.fullmatch(r"started in \d+ s", lines[-1])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_notices_of_a_start_are_shown_where_bars_are(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr("specwire.offline.waiting._FIRST_NOTICE_S", 0.01)
    starting, screen = Future[None](), io.StringIO()

    def describe() -> str:
        starting.set_result(None)  # the first notice is the last one
        return "waiting for the verifier"

    wait_with_notices(starting, describe, console=Console(file=screen, force_terminal=is_terminal))
    shown = ["starting for 0.01 s: waiting for the verifier", "started in 0 s"] if is_terminal else []
    assert screen.getvalue().splitlines() == shown


def test_a_coordinator_that_is_lost_is_named(events: Path) -> None:
    with LLM() as llm:
        os.kill(llm.pids["coordinator"], signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT_S
        while True:  # whatever the fake answers: none of it may hang, and in the end it is said
            assert time.monotonic() < deadline
            try:
                llm.generate("a", timeout=0.2)
            except UnavailableError as error:
                if "coordinator ended with signal SIGKILL; close this LLM" in str(error):
                    break
            except SpecwireError:
                continue


def test_a_fork_stops_nothing(events: Path) -> None:
    with LLM() as llm:
        child = os.fork()
        if not child:
            status = 1
            try:
                llm.generate("a")
            except FailedPreconditionError:
                llm.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert all(is_alive(pid) for pid in llm.pids.values())


PROGRAM = """
import sys
from specwire import LLM
llm = LLM()
print("ready", flush=True)
{rest}
"""


def start(rest: str) -> "subprocess.Popen[str]":
    """A program whose standard input stays open, whatever this process has as its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(rest=rest)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("rest", "status", "error"),
    [("llm.self = llm", 0, ""), ("llm.missing", 1, "AttributeError")],
    ids=["end", "error"],
)
def test_the_end_of_the_program(events: Path, socket_dir: Path, rest: str, status: int, error: str) -> None:
    program = start(rest)
    _, said = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == status, said
    assert error in said
    assert ("Traceback" in said) is bool(error)
    check_gone(events, socket_dir)


def test_ctrl_c_while_it_runs(events: Path, socket_dir: Path) -> None:
    program = start("sys.stdin.read()")
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=TIMEOUT_S)
    assert said.count("KeyboardInterrupt") == 1
    check_gone(events, socket_dir)


def test_ctrl_c_while_it_starts(events: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_COORDINATOR", json.dumps({"ready": False}))
    program = start("")
    asyncio.run(until(lambda: len(happened(events, "start")) == 3, TIMEOUT_S))
    program.send_signal(signal.SIGINT)
    out, said = program.communicate(timeout=TIMEOUT_S)
    assert (out, said.strip().splitlines()[-1]) == ("", "KeyboardInterrupt")
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]
    assert not list(socket_dir.iterdir())


def test_a_program_that_is_killed_leaves_no_process(events: Path) -> None:
    program = start("sys.stdin.read()")
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.kill()
    program.communicate(timeout=TIMEOUT_S)
    asyncio.run(until(lambda: not any(is_alive(pid) for _, pid in happened(events, "start")), TIMEOUT_S))


def test_importing_the_package_loads_none_of_it() -> None:
    program = "import sys, specwire; from specwire import SamplingParams; print([n for n in sys.modules if n in ('grpc', 'rich', 'typer', 'torch')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
