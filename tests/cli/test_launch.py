"""Supervision of child processes, with services that are only healthy."""

import asyncio
import errno
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from specwire.errors import UnavailableError
from specwire.launch import ServiceProcess, ServiceSpec, Supervisor

TIMEOUT_S = 60.0


class Log:
    """Takes the services' lines and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    async def wait_ready(self, name: str, count: int = 1) -> None:
        """Returns once this service has been ready `count` times."""
        async with asyncio.timeout(TIMEOUT_S):
            while sum(line.startswith(f"ready: {name} ") for _, line in self.lines) < count:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def stack(socket_dir: Path) -> list[list[ServiceSpec]]:
    def spec(kind: str, essential: bool = False) -> ServiceSpec:
        address = f"unix:{socket_dir}/{kind}"
        return ServiceSpec(kind, "fake_service", (kind, f"--listen={address}"), address, essential)

    return [[spec("verifier"), spec("drafter")], [spec("coordinator", essential=True)]]


@pytest.fixture
def log() -> Log:
    return Log()


def happened(events: Path, event: str) -> list[tuple[str, int]]:
    """(service, process) of every event of this kind, in order."""
    rows = [line.split() for line in events.read_text(encoding="utf-8").splitlines()]
    return [(kind, int(pid)) for name, kind, pid in rows if name == event]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_starts_in_order_and_stops_in_reverse(stack: list[list[ServiceSpec]], log: Log, events: Path) -> None:
    supervisor = Supervisor(stack, log)
    async with asyncio.timeout(TIMEOUT_S):
        await supervisor.start()
        assert [kind for kind, _ in happened(events, "start")][-1] == "coordinator"
        assert len(happened(events, "start")) == 3
        assert ("verifier", f"ready: verifier {stack[0][0].address} --listen={stack[0][0].address}") in log.lines
        await supervisor.stop()
    assert next(kind for kind, _ in happened(events, "stop")) == "coordinator"
    assert len(happened(events, "stop")) == 3
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]
    assert [service.pid for group in supervisor.groups for service in group] == [None] * 3


async def test_early_end_is_reported(stack: list[list[ServiceSpec]], log: Log, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRAFTER", json.dumps({"status": 3, "line": "the model file x.gguf does not exist"}))
    supervisor = Supervisor(stack, log)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(UnavailableError, match=r"drafter ended with status 3 before .* ready; its own lines say why$"):
            await supervisor.start()
        await supervisor.stop()
    assert log.lines.count(("drafter", "the model file x.gguf does not exist")) == 1
    assert "coordinator" not in dict(happened(events, "start"))
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]


async def test_loss_of_a_healthy_service_ends_the_wait_for_the_next_group(
    stack: list[list[ServiceSpec]], log: Log, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_COORDINATOR", json.dumps({"ready": False}))
    supervisor = Supervisor(stack, log)
    starting = asyncio.create_task(supervisor.start())
    await log.wait_ready("coordinator")
    os.kill(dict(happened(events, "start"))["verifier"], signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(UnavailableError, match="verifier ended with signal SIGKILL before everything was ready"):
            await starting
        await supervisor.stop()


async def test_service_that_never_gets_healthy(stack: list[list[ServiceSpec]], log: Log, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERIFIER", json.dumps({"ready": False}))
    supervisor = Supervisor(stack, log, startup_timeout_s=0.5)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(UnavailableError, match=r"verifier is not ready after 0\.5 s( and wrote nothing|; its own lines say why)$"):
            await supervisor.start()
        await supervisor.stop()
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]


@pytest.mark.parametrize("kind", ["drafter", "verifier"])
async def test_restart_after_a_loss(stack: list[list[ServiceSpec]], log: Log, events: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    supervisor = Supervisor(stack, log, first_backoff_s=0.05)
    async with asyncio.timeout(TIMEOUT_S):
        await supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        service = next(service for service in supervisor.groups[0] if service.spec.name == kind)
        for num_losses in (1, 2):
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            await log.wait_ready(kind, num_losses + 1)
            await service.wait_serving()
        assert not watching.done()
        watching.cancel()
        await supervisor.stop()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{kind} ended with signal SIGKILL and is restarted in {pause} s" for pause in ("0.05", "0.1")]
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]


async def test_loss_of_an_essential_service_ends_the_watch(stack: list[list[ServiceSpec]], log: Log, events: Path) -> None:
    supervisor = Supervisor(stack, log)
    async with asyncio.timeout(TIMEOUT_S):
        await supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        os.kill(dict(happened(events, "start"))["coordinator"], signal.SIGTERM)
        with pytest.raises(UnavailableError, match="coordinator ended with status 0"):
            await watching
        await supervisor.stop()
    assert len(happened(events, "start")) == 3


async def test_service_that_ignores_the_stop_is_killed(
    stack: list[list[ServiceSpec]], log: Log, events: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_DRAFTER", json.dumps({"deaf": True}))
    supervisor = Supervisor([stack[0]], log, grace_s=0.5)
    async with asyncio.timeout(TIMEOUT_S):
        await supervisor.start()
        await supervisor.stop()
    assert "drafter did not stop within 0.5 s and is killed" in caplog.text
    assert not [pid for _, pid in happened(events, "start") if is_alive(pid)]


@pytest.mark.skipif(sys.platform != "linux", reason="has no file descriptors of processes")
async def test_children_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may have no more threads, a child would run already that nobody knows of."""

    async def run() -> str:
        service = ServiceProcess(ServiceSpec("tool", "json.tool", ("--unknown",), ""), lambda *_: None)
        await service.start()
        return await service.wait_ended()

    async with asyncio.timeout(TIMEOUT_S):
        # Loops of several threads at once, as an LLM's beside its user's.
        assert await asyncio.gather(run(), asyncio.to_thread(asyncio.run, run())) == ["status 2"] * 2

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            assert await run() == "status 2"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("can't start new thread"),
            r"verifier can't be started \(can't start new thread\): this user may have .* processes and threads",
        ),
        (OSError(errno.EAGAIN, ""), r"\(Resource temporarily unavailable\): this user .* \(ulimit -u\).*; end other programs, raise the limit, or"),
        (OSError(errno.ENOMEM, ""), r"\(Cannot allocate memory\): there is no memory for another process; end other programs"),
        (OSError(errno.EMFILE, ""), r"\(Too many open files\): this process may have \d+ open files \(ulimit -n\); raise the limit"),
        (OSError(errno.EACCES, ""), rf"\(Permission denied\): it is run by {re.escape(sys.executable)}; check"),
    ],
)
async def test_what_keeps_a_process_from_starting_is_named(
    stack: list[list[ServiceSpec]], log: Log, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    supervisor = Supervisor(stack, log)
    with pytest.raises(UnavailableError, match=message):
        await supervisor.start()
    await supervisor.stop()


async def test_other_errors_of_a_start_are_faults(stack: list[list[ServiceSpec]], log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no loop")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(RuntimeError, match="no loop"):
        await Supervisor(stack, log).start()


async def test_a_restart_that_fails_is_tried_again(
    stack: list[list[ServiceSpec]], log: Log, events: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor([stack[0]], log, first_backoff_s=0.05)
    start, num_failed = asyncio.create_subprocess_exec, 0

    async def fail_twice(*arguments: Any, **options: Any) -> Any:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise BlockingIOError(errno.EAGAIN, "")
        return await start(*arguments, **options)

    async with asyncio.timeout(TIMEOUT_S):
        await supervisor.start()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail_twice)
        watching = asyncio.create_task(supervisor.watch())
        service = supervisor.groups[0][1]
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        await log.wait_ready("drafter", 2)
        assert not watching.done()
        watching.cancel()
        await supervisor.stop()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[0] == "drafter ended with signal SIGKILL and is restarted in 0.05 s"
    assert [warning.rpartition("; ")[2] for warning in warnings[1:]] == ["tried again in 0.1 s", "tried again in 0.2 s"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's signal at the death of a parent")
def test_no_orphans_when_the_parent_is_killed(socket_dir: Path, events: Path) -> None:
    address = f"unix:{socket_dir}/drafter"
    program = (
        "import asyncio, sys\n"
        "from specwire.launch import ServiceSpec, Supervisor\n"
        "async def main():\n"
        f"    spec = ServiceSpec('drafter', 'fake_service', ('drafter', '--listen={address}'), '{address}')\n"
        "    await Supervisor([[spec]], lambda name, line: None).start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    ((_, pid),) = happened(events, "start")
    orphan = os.pidfd_open(pid)
    parent.kill()
    parent.wait(TIMEOUT_S)
    parent.stdout.close()
    ended, _, _ = select.select([orphan], [], [], TIMEOUT_S)
    os.close(orphan)
    assert ended, f"process {pid} outlives its parent"


def test_child_of_a_dead_parent_does_not_start(events: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "specwire.child", "1", "fake_service", "drafter"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.returncode == 1
    assert "fake_service not started: its parent, process 1, has ended" in result.stderr
    assert not happened(events, "start")
