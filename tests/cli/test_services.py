"""`specwire verifier|drafter|coordinator`: the service itself, with ./specwire.yaml. The services are fakes that print their flags."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_launch import happened

TIMEOUT_S = 60.0


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "specwire.cli", *arguments], cwd=folder, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("service", ["verifier", "drafter", "coordinator"])
def test_a_service_runs_with_its_flags_and_the_file(events: Path, tmp_path: Path, socket_dir: Path, service: str) -> None:
    (tmp_path / "specwire.yaml").write_text(f"{service}: {{listen: 'unix:{socket_dir}/by-file', max_num_seqs: 7}}\n")
    with start(tmp_path, service, "--max-num-seqs", "9") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "specwire: configuration of specwire.yaml\n"
        assert process.stderr.readline() == f"ready: {service} unix:{socket_dir}/by-file --config=specwire.yaml --max-num-seqs 9\n"
        assert happened(events, "start") == [(service, process.pid)], "the process is the service, so that signals reach it"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    assert [kind for kind, _ in happened(events, "stop")] == [service]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--help"], "--max-num-seqs"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0, but must be a number from 1"),
        (["--config", "gone.yaml"], "there is no configuration file gone.yaml; correct the name"),
        (["surplus"], "surplus"),
    ],
)
def test_flags_are_read_by_the_service(events: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "specwire.yaml").write_text("verifier: {max_num_seqs: 7}\n")
    result = subprocess.run(
        [sys.executable, "-m", "specwire.cli", "verifier", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ,
    )
    assert result.returncode == (0 if arguments == ["--help"] else 2)
    assert text in result.stdout + result.stderr
    assert (
        f"{'usage: ' if '--help' in arguments else ''}specwire verifier"
        in (result.stdout + result.stderr).splitlines()[-1 if result.returncode else 0]
    )
