"""A coordinator that ends and starts again between requests."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire import Client


class Process:
    """A coordinator over a scripted verifier, as processes."""

    def __init__(self, socket_dir: Path) -> None:
        self.address = f"unix:{socket_dir}/c.sock"
        self._verifier_address = f"unix:{socket_dir}/v.sock"
        self._verifier = subprocess.Popen([sys.executable, "-m", "tests.scripted", "verifier", self._verifier_address])
        self.start()

    def start(self) -> None:
        self._coordinator = subprocess.Popen([sys.executable, "-m", "coordinator", "--listen", self.address, "--verifiers", self._verifier_address])

    def end(self, number: signal.Signals) -> None:
        self._coordinator.send_signal(number)
        self._coordinator.wait()

    def close(self) -> None:
        for program in (self._coordinator, self._verifier):
            program.kill()
            program.wait()


@pytest.fixture
def process(socket_dir: Path) -> Iterator[Process]:
    process = Process(socket_dir)
    yield process
    process.close()


def test_a_restart_between_requests_is_invisible(process: Process) -> None:
    with Client(process.address) as client, Client(process.address) as watcher:
        client.wait_ready(30)
        first = client.generate("text", max_tokens=8, seed=1)
        for number in (signal.SIGKILL, signal.SIGTERM):
            process.end(number)
            process.start()
            watcher.wait_ready(30)
            assert client.generate("text", max_tokens=8, seed=1).token_ids == first.token_ids
            assert "".join(event.text for event in client.stream("text", max_tokens=8, seed=1)) == first.text
