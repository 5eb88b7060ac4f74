"""`specwire up` as a process, with services that are only healthy."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_launch import happened, is_alive
from tests.cli.up_process import TIMEOUT_S, Up

Start = Callable[..., Up]


@pytest.fixture
def start(events: Path, tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[Up] = []
    monkeypatch.setenv("TMPDIR", str(socket_dir))

    def start(*options: str) -> Up:
        started.append(Up(tmp_path, *options))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.join()


def running(events: Path) -> list[int]:
    return [pid for _, pid in happened(events, "start") if is_alive(pid)]


IN_ORDER = ["coordinator", "drafter", "verifier"]


def test_a_closed_terminal_stops_in_order(start: Start, events: Path) -> None:
    up = start("--port", "0")
    up.wait_ready()
    assert up.end(signal.SIGHUP) == 0
    assert not running(events)
    assert [kind for kind, _ in happened(events, "stop")] == IN_ORDER


@pytest.mark.parametrize("streams", ["|", "2>&1 |"])
def test_a_pipe_that_nobody_reads_stops_in_order(
    events: Path, tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, streams: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(socket_dir))
    command = [sys.executable, "-m", "specwire.cli", "up", "--port", "0", "--no-http"]
    shell = f'"$@" {streams} true; wait'  # which is gone before anything is written
    result = subprocess.run(["bash", "-c", shell, "bash", *command], cwd=tmp_path, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert "Traceback" not in result.stderr
    assert not running(events)
    # The second one may go while the services still start.
    stopped = [kind for kind, _ in happened(events, "stop")]
    assert stopped == (IN_ORDER if streams == "|" else IN_ORDER[-len(stopped) :])


def test_up_reports_and_stops_in_order(start: Start, events: Path, socket_dir: Path) -> None:
    up = start("--port", "0")
    address = up.wait_ready()
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert address != "127.0.0.1:50050"
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=TIMEOUT_S):
        pass
    assert len(running(events)) == 3
    assert up.end(signal.SIGINT) == 0
    assert not running(events)
    assert [kind for kind, _ in happened(events, "stop")] == ["coordinator", "drafter", "verifier"]
    stdout = " ".join(up.output["stdout"].split())
    assert f"coordinator {address} clients call here" in stdout
    assert "fake-model float32 on cpu" in stdout
    assert "clipped: num_speculative_tokens clipped from 5 to 4: a verifier takes no more" in stdout
    assert f"--address {address}" in stdout
    assert "\x1b" not in up.output["stdout"] + up.output["stderr"], "no control codes without a terminal"
    assert re.search(r"^verifier    \| ready: verifier unix:", up.output["stderr"], re.MULTILINE)
    assert not list(socket_dir.iterdir()), "the folder of the sockets was left behind"


def test_options_reach_the_services(start: Start) -> None:
    speculative = '{"num_speculative_tokens": 3, "prompt-lookup-max": 3}'
    up = start("--port", "0", "--max-num-seqs", "2", "--verifiers", "2", "--drafters", "2", "--speculative-config", speculative)
    up.wait_ready()
    for name in ("verifier-0", "verifier-1", "drafter-0", "drafter-1", "coordinator"):
        flags = up.wait_for(rf"(?m)^{name} +\| (ready: .*)$", "stderr")
        assert '"num_speculative_tokens": 3' in flags
        assert '"prompt_lookup_min": 3' in flags
    assert "--max-num-seqs=2 " in up.wait_for(r"verifier-0 +\| (ready: .*)", "stderr")
    assert up.end() == 0


def test_the_file_of_the_folder_reaches_the_services(start: Start, tmp_path: Path) -> None:
    """Flags go before it; services with a port of their own take one after the other."""
    (tmp_path / "specwire.yaml").write_text(
        """\
speculative_config: {num_speculative_tokens: 3}
verifier: {max_num_seqs: 2, dtype: float32}
coordinator: {max_queue: 7}
drafters:
- {method: ngram, prompt_lookup_max: 9}
- {method: draft_model, model: draft, device: "cuda:1"}
up: {port: 0}
"""
    )
    up = start("--max-num-seqs", "4", "--set", "coordinator.max_queue=8", "--trace-file", "spans.jsonl", "--metrics-port", "9999")
    up.wait_ready()
    up.wait_for("(?m)^specwire: configuration of specwire.yaml$", "stderr")
    flags = {name: up.wait_for(rf"(?m)^{name} +\| (ready: .*)$", "stderr") for name in ("verifier", "drafter-0", "drafter-1", "coordinator")}
    assert "--dtype=float32 " in flags["verifier"]
    assert "--max-num-seqs=4 " in flags["verifier"]
    assert "--max-queue=8 " in flags["coordinator"]
    assert '"method": "ngram"' in flags["drafter-0"]
    assert '"prompt_lookup_max": 9' in flags["drafter-0"]
    assert '"model": "draft"' in flags["drafter-1"]
    assert "--device=cuda:1 " in flags["drafter-1"]
    assert all("--trace-file=spans.jsonl " in text and '"num_speculative_tokens": 3' in text for text in flags.values())
    ports = [re.findall(r"--metrics-listen=127.0.0.1:(\d+)", text) for text in flags.values()]
    assert ports == [["9999"], ["10000"], ["10001"], ["10002"]]
    assert "ngram, draft_model" in up.output["stdout"]
    assert up.end() == 0


@pytest.mark.parametrize(
    ("text", "message"), [("up: {prt: 1}\n", "specwire.yaml:1: up.prt is an unknown key"), ("verifier: {dtype: x}\n", "dtype is 'x'")]
)
def test_a_bad_file_is_named_before_anything_starts(start: Start, events: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "specwire.yaml").write_text(text)
    up = start()
    assert up.join() == 2
    assert message in up.output["stderr"]
    assert not happened(events, "start")
    (tmp_path / "specwire.yaml").unlink()


def test_no_drafter_and_a_demo_that_fails(start: Start, events: Path) -> None:
    up = start("--port", "0", "--no-drafter", "--demo")
    up.wait_ready()
    assert {kind for kind, _ in happened(events, "start")} == {"verifier", "coordinator"}
    assert "none: plain decoding" in up.output["stdout"]
    up.wait_for("the demo failed: ", "stderr")
    assert up.process.poll() is None, "serving goes on"
    assert up.end() == 0


def test_early_end_of_a_service(start: Start, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERIFIER", json.dumps({"status": 1, "line": "the model file is damaged"}))
    up = start("--port", "0")
    assert up.join() == 1
    assert "specwire: verifier ended with status 1 before everything was ready; its own lines say why\n" in up.output["stderr"]
    assert up.output["stderr"].count("the model file is damaged") == 1
    assert "Traceback" not in up.output["stderr"]
    assert not running(events)


def test_service_that_is_never_healthy(start: Start, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERIFIER", json.dumps({"ready": False}))  # the first to start: on a slow machine another would be named
    up = start("--port", "0", "--startup-timeout", "1")
    assert up.join() == 1
    assert "specwire: verifier is not ready after 1 s" in up.output["stderr"]
    assert not running(events)


def test_stop_while_starting(start: Start, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERIFIER", json.dumps({"ready": False}))
    up = start("--port", "0")
    up.wait_for("ready: verifier", "stderr")
    assert up.end() == 0
    assert not running(events)


@pytest.mark.parametrize("name", ["verifier", "drafter", "coordinator"])
def test_a_lost_service_is_restarted(start: Start, events: Path, name: str) -> None:
    up = start("--port", "0")
    up.wait_ready()
    os.kill(dict(happened(events, "start"))[name], signal.SIGKILL)
    up.wait_for(f"ready: {name}", "stderr", count=2)
    assert f"{name} ended with signal SIGKILL and is restarted" in up.output["stderr"]
    assert up.process.poll() is None
    assert up.end() == 0
    assert not running(events)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's signal at the death of a parent")
def test_nothing_outlives_a_killed_up(start: Start, events: Path) -> None:
    up = start("--port", "0")
    up.wait_ready()
    descriptors = [os.pidfd_open(pid) for pid in running(events)]
    assert len(descriptors) == 3
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    deadline = time.monotonic() + TIMEOUT_S
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        os.close(descriptor)
        assert ended
    assert not running(events)


def test_second_signal_kills(start: Start, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRAFTER", json.dumps({"deaf": True}))
    up = start("--port", "0")
    up.wait_ready()
    up.process.send_signal(signal.SIGINT)
    up.wait_for("stopping", "stderr")
    assert up.end(signal.SIGINT) == 0
    assert "did not stop within" not in up.output["stderr"], "the grace period was waited for"
    assert not running(events)


def test_port_in_use_is_named_before_anything_starts(start: Start, events: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        up = start("--port", str(port))
        assert up.join() == 1
    assert f"specwire: port {port} on 127.0.0.1 can't be used (Address already in use); " in up.output["stderr"]
    assert "--port" in up.output["stderr"]
    assert not happened(events, "start")


def test_one_port_for_both_apis_is_refused_before_anything_starts(start: Start, events: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
    up = start("--port", str(port), "--http-port", str(port))
    assert up.join() == 1
    assert f"127.0.0.1:{port} is to be gRPC's and the HTTP API's address; choose another one with --port or --http-port" in up.output["stderr"]
    assert not happened(events, "start")


@pytest.mark.parametrize("model", ["./no-such-folder", "no-such-file.gguf", "~/no-such-folder"])
def test_missing_model_is_named_before_anything_starts(start: Start, events: Path, model: str) -> None:
    up = start("--port", "0", "--model", model)
    assert up.join() == 1
    assert f"specwire: the model {model} does not exist; give a Hugging Face folder, a .gguf file or a hub id\n" in up.output["stderr"]
    assert not happened(events, "start")
