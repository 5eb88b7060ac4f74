"""`specwire http` as it is started: one process or several, stopped by SIGTERM while streams run."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specwire.health import SERVING, check_health
from tests.http.serving import Answer, Front, Served, http_served, request
from tests.metrics.scrape import parse, value

TIMEOUT_S = 50.0
LONG = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": 5}


class HttpProcess:
    """A running `python -m specwire.http`; its log is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process, port: int = 0) -> None:
        self.process = process
        self.front = Front("", None, None, None)  # type: ignore[arg-type]
        self.log: list[str] = []

    async def wait_for(self, text: str) -> str:
        """The first line that has it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            while line := (await self.process.stderr.readline()).decode():
                self.log.append(line)
                if text in line:
                    return line
        raise AssertionError(f"no {text!r} in {''.join(self.log)}")

    async def end(self) -> int:
        """Its exit status, when it has ended by itself."""
        assert self.process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            self.log.append((await self.process.stderr.read()).decode())
            return await self.process.wait()


@contextlib.asynccontextmanager
async def started(*flags: str) -> AsyncIterator[HttpProcess]:
    command = [sys.executable, "-m", "specwire.http", "--config=", "--listen=127.0.0.1:0", *flags]
    running = HttpProcess(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE))
    try:
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
            await running.process.wait()


@pytest.fixture
async def served(socket_dir: Path) -> AsyncIterator[Served]:
    async with http_served(socket_dir, verifier={"delay_s": 0.004}) as served:
        yield served


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_stopped_while_streams_run(served: Served, socket_dir: Path, num_processes: int) -> None:
    health = f"unix:{socket_dir}/health"
    flags = (f"--coordinator=unix:{socket_dir}/coordinator.sock", f"--processes={num_processes}", f"--health-listen={health}")
    async with started(*flags, "--metrics-listen=127.0.0.1:0") as running:
        ready = await running.wait_for(" http INFO ready: http")
        here = Front(f"http://{ready.split('ready: http ')[1].split(',')[0].strip()}", served.service, served.upstream, served.openai)
        assert await asyncio.to_thread(check_health, health) == SERVING
        assert (await here.get("/health/ready")).status == 200
        answers = await asyncio.gather(*(here.post("/v1/completions", {"prompt": "a", "max_tokens": 5}) for _ in range(8)))
        assert [answer.status for answer in answers] == [200] * 8
        series = parse((await here.get("/metrics")).body.decode())
        assert value(series, "specwire_http_generated_tokens_total") == 40
        assert value(series, "specwire_http_ready_processes") == num_processes
        if num_processes > 1:
            await _kill_one(running, here, num_processes)
        streams = [await _begin(here) for _ in range(4)]
        running.process.send_signal(signal.SIGTERM)
        texts = [_text(await reader.read()) for reader, _ in streams]
        assert set(texts) == {bytes(served.verifier.target.generate([97], 300, 5)).decode()}
        for _, writer in streams:
            writer.close()
        assert await running.end() == 0, "".join(running.log)
        if num_processes > 1:
            started_at = next(index for index, line in enumerate(running.log) if "ready: http" in line)
            assert not [line for line in running.log[:started_at] if "fork" in line], "gRPC has threads while processes are started"
    await served.until_idle()


async def test_new_requests_are_refused_until_it_has_stopped(served: Served, socket_dir: Path) -> None:
    async with started(f"--coordinator=unix:{socket_dir}/coordinator.sock") as running:
        ready = await running.wait_for("ready: http")
        here = Front(f"http://{ready.split('ready: http ')[1].strip()}", served.service, served.upstream, served.openai)
        reader, writer = await _begin(here)
        running.process.send_signal(signal.SIGTERM)
        await running.wait_for("stopping")
        refused: Answer = await here.post("/v1/completions", {"prompt": "a"})
        assert refused.status == 503
        assert (await here.get("/health/ready")).status == 503
        assert b"[DONE]" in await reader.read()
        writer.close()
        assert await running.end() == 0


async def test_an_address_that_is_taken(served: Served) -> None:
    for flags in (["--processes=2"], []):
        async with started(f"--listen=127.0.0.1:{served.port}", *flags) as running:
            assert await running.end() == 1
            assert f"cannot listen on 127.0.0.1:{served.port}" in "".join(running.log)
            assert "Traceback" not in "".join(running.log)


async def _begin(here: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream whose first tokens have come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(request("POST", "/v1/completions", json.dumps(LONG).encode(), content_type="application/json"))
    await reader.readuntil(b"data: ")
    return reader, writer


def _text(rest: bytes) -> str:
    """Of all events, the first of which has lost its beginning; each is one chunk of the body."""
    events = [line.removeprefix(b"data: ") for line in rest.splitlines() if line.startswith((b"data: {", b'{"id"'))]
    assert b"data: [DONE]" in rest
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def _kill_one(running: HttpProcess, here: Front, num_processes: int) -> None:
    """Another one takes its place, and nothing that was counted is lost."""
    found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_worker(pid, running.process.pid)]
    assert len(found) == num_processes
    os.kill(found[0], signal.SIGKILL)
    await running.wait_for("is restarted")
    await running.wait_for("ready: http")
    series = parse((await here.get("/metrics")).body.decode())
    assert value(series, "specwire_http_generated_tokens_total") == 40
    assert value(series, "specwire_http_ready_processes") == num_processes


def _is_worker(pid: int, parent: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[1]) == parent and b"specwire.http.worker" in command
