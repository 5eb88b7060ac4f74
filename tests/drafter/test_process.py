"""The drafter as a process: its start, its end, and what it refuses."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_svc.__main__ import serve
from specwire.config import DrafterConfig

pytestmark = pytest.mark.timeout(60)


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Exception, match=f"cannot listen on {address}"):
            await serve(DrafterConfig(listen=(address,)))


def run_drafter(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "drafter_svc", *arguments], stderr=subprocess.PIPE, text=True)


def test_process_starts_soon_small_and_without_torch_and_ends_with_0(socket_dir: Path) -> None:
    process = run_drafter(f"--listen=unix:{socket_dir}/d")
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "ready: drafter" in line:
                break
        assert f"ready: drafter unix:{socket_dir}/d" in lines[-1], lines
        maps = Path(f"/proc/{process.pid}/maps")
        if maps.exists():
            assert _cpu_s(process.pid) < 3, lines
            assert "libtorch" not in maps.read_text()
            assert _resident_mib(process.pid) < 150
        process.send_signal(signal.SIGTERM)
        lines.extend(process.stderr)
        assert process.wait(60) == 0, lines
    finally:
        process.kill()
        process.stderr.close()


def _cpu_s(pid: int) -> float:
    """What it has computed so far: how long that took says more about the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (['--speculative-config={"method": "medusa"}'], 2, "method 'medusa' is not built"),
        (['--speculative-config={"method": "frobnicate"}'], 2, "method is 'frobnicate'"),
        (['--speculative-config={"method": null}'], 1, "method is null"),
        (['--speculative-config={"method": "draft_model", "model": "no/such/folder"}'], 1, "no/such/folder"),
        (["--prefill-chunk=0"], 2, "prefill-chunk"),
        (["--listen=127.0.0.1:99999"], 2, "127.0.0.1:99999"),
    ],
)
def test_process_refuses_with_one_line(socket_dir: Path, arguments: list[str], status: int, message: str) -> None:
    process = run_drafter(f"--listen=unix:{socket_dir}/d", *arguments)
    _, stderr = process.communicate(timeout=50)
    assert process.returncode == status, stderr
    lines = [line for line in stderr.splitlines() if line and " INFO " not in line]
    assert message in lines[-1]
    assert "Traceback" not in stderr
    assert len(lines) == 1, stderr
