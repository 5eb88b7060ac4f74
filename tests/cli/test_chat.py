"""`specwire chat`: turns with history, commands, and Ctrl-C that ends the answer alone."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner, Result

from coordinator.sink import Sink
from specwire.cli import app
from specwire.cli.chat import Interrupts
from specwire.errors import InvalidArgumentError
from specwire.messages import GenerateRequest
from tests.cli.conftest import Coordinator
from tests.coordinator.scripted_engine import ScriptedRequest

TIMEOUT_S = 60.0


def chat(coordinator: Coordinator, questions: str | bytes, *options: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--max-tokens", "2", "--address", coordinator.address, *options], input=questions)


def prompts(coordinator: Coordinator) -> list[str]:
    return [bytes(request.request.prompt_token_ids).decode() for request in coordinator.engine.requests]


def test_history_is_kept_until_reset(coordinator: Coordinator) -> None:
    result = chat(coordinator, "A\n\nK\n/reset\nP\n")
    assert (result.exit_code, result.stderr) == (0, "")
    answers = result.stdout.splitlines()
    assert len(answers) == 3
    assert all(len(answer) == 2 for answer in answers)
    assert prompts(coordinator) == ["<A>", f"<A><{answers[0]}><K>", "<P>"]


def test_quit_and_the_system_message(coordinator: Coordinator) -> None:
    result = chat(coordinator, "A\n/reset\nB\n/quit\nC\n", "--system", "S", "--temperature", "0.5", "--seed", "3", "--top-p", "0.5")
    assert result.exit_code == 0
    assert prompts(coordinator) == ["<S><A>", "<S><B>"]
    sampling = coordinator.engine.requests[0].request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.top_p) == (2, 0.5, 3, 0.5)


def test_unknown_commands_are_not_sent(coordinator: Coordinator) -> None:
    result = chat(coordinator, "/help me\nA\n")
    assert result.exit_code == 0
    assert "/help is no command: /reset forgets" in result.stderr
    assert prompts(coordinator) == ["<A>"]


def test_a_turn_that_fails_is_forgotten(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = coordinator.engine.submit

    def refuse_long_ones(request: GenerateRequest, sink: Sink) -> ScriptedRequest:
        if b"BB" in bytes(request.prompt_token_ids):
            raise InvalidArgumentError("the prompt is too long; send a shorter one")
        return submit(request, sink)

    monkeypatch.setattr(coordinator.engine, "submit", refuse_long_ones)
    result = chat(coordinator, "A\nBBBBBBBB\nB\n")
    assert result.exit_code == 1, "not all were answered"
    assert len([line for line in result.stdout.splitlines() if line]) == 2
    assert result.stderr == "specwire: the prompt is too long; send a shorter one\n"
    assert [prompt[-3:] for prompt in prompts(coordinator)] == ["<A>", "<B>"]


def test_what_is_no_text_is_named(coordinator: Coordinator) -> None:
    result = chat(coordinator, b"\xff\nA\n")
    assert result.exit_code == 1
    assert result.stderr == "specwire: the question is not valid UTF-8 (byte 0); convert it (iconv -t UTF-8)\n"
    assert prompts(coordinator) == ["<A>"]


@pytest.mark.usefixtures("hasty")
def test_without_a_coordinator_or_a_tokenizer(bare_coordinator: Coordinator) -> None:
    result = CliRunner().invoke(app, ["chat", "--address", "127.0.0.1:1"], input="A\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "127.0.0.1:1" in result.stderr
    assert "(`specwire up` starts one on this machine, --address names another)" in result.stderr
    result = chat(bare_coordinator, "A\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "serves no tokenizer" in result.stderr


class Terminal:
    """`specwire chat` on a terminal of its own."""

    def __init__(self, address: str) -> None:
        self._own, theirs = pty.openpty()
        command = [sys.executable, "-m", "specwire.cli", "chat", "--max-tokens", "100000000", "--address", address]
        environment = {**os.environ, "PYTHONUTF8": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
        os.close(theirs)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str, since: int = 0) -> int:
        """Where the text ends on the screen, once it is there."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.screen[since:]:
            readable, _, _ = select.select([self._own], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"no {text!r} in {self.screen[-1000:]!r}"
            self.screen += os.read(self._own, 1 << 16).decode("utf-8", "replace")
        return self.screen.index(text, since) + len(text)

    def interrupt_until(self, text: str, since: int) -> int:
        """Sends Ctrl-C until the text is there: one that comes between a prompt and the read behind it is lost until a key is pressed."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.screen[since:]:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen[-1000:]!r}"
            os.kill(self.process.pid, signal.SIGINT)
            if select.select([self._own], [], [], 0.5)[0]:
                self.screen += os.read(self._own, 1 << 16).decode("utf-8", "replace")
        return self.screen.index(text, since) + len(text)

    def end(self) -> int:
        """Sends Ctrl-D until the program has ended: one that comes before the read behind a prompt is lost."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self.type("\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(0.5)
        raise AssertionError(f"it goes on after {self.screen[-1000:]!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        os.close(self._own)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_program(coordinator: Coordinator) -> None:
    coordinator.engine.eos_token_ids = ()  # answers go on
    terminal = Terminal(coordinator.address)
    try:
        seen = terminal.wait_for("> ", terminal.wait_for("Ctrl-D the program"))
        terminal.type("A\n")
        seen = terminal.wait_for("BCDEFG", seen)
        os.kill(terminal.process.pid, signal.SIGINT)
        seen = terminal.wait_for("> ", terminal.wait_for("[ended]", seen))
        coordinator.wait_for_ends(1)
        assert coordinator.engine.requests[0].is_cancelled
        seen = terminal.interrupt_until("> ", seen)  # while nothing runs: another prompt
        assert terminal.end() == 0
        assert "Traceback" not in terminal.screen
    finally:
        terminal.close()


def test_ctrl_c_means_something_once_and_only_where_it_is_allowed() -> None:
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    with interrupts.handled():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with interrupts.allowed():
            pass
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
