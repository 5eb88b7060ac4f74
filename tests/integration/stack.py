"""Real services for tests: child processes that can be killed and paused, and a coordinator in the test's own process."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire.client.aio import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig, flags
from specwire.speculative_config import SpeculativeConfig
from specwire.tracing import open_tracer
from verifier_svc.loading import LoadedVerifier, load_verifier
from verifier_svc.server import VerifierServer

NUM_THREADS = 1
"""CPU threads of every service that runs a model: how sums are split over threads, and so their rounding, is then the same everywhere."""
_MODULES = {VerifierConfig: "verifier_svc", DrafterConfig: "drafter_svc", CoordinatorConfig: "coordinator"}
_READY_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 60.0


class Service:
    """`python -m verifier_svc|drafter_svc|coordinator` as a child process, which ends with this one. Start it from the main thread."""

    def __init__(self, config: VerifierConfig | DrafterConfig | CoordinatorConfig) -> None:
        self.address = config.listen[0]
        self._arguments = [sys.executable, "-m", "specwire.child", str(os.getpid()), _MODULES[type(config)], *flags(config)]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._at_end = True

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has written since its last start."""
        with self._news:
            return "\n".join(self._lines)

    def start(self) -> None:
        """Starts the process and returns at once."""
        assert not self.is_running, f"{self.address} runs already"
        self._lines, self._at_end = [], False
        # Threads that wait for one another should not keep the cores of a busy machine from the one they wait for.
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            self._arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Returns once its log has the text."""
        with self._news:
            found = self._news.wait_for(lambda: self._at_end or any(text in line for line in self._lines), timeout_s)
            is_there = any(text in line for line in self._lines)
        assert is_there, f"{self._arguments} {'ended' if found else 'did not write'} before {text!r}:\n{self.log}"

    def wait_ready(self) -> None:
        """Returns once it serves."""
        self.wait_for("ready: ")

    def wait_ended(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        """Its exit status, once it has ended and its log is complete."""
        assert self._process is not None, "the service was never started"
        assert self._reader is not None, "a started service has a reader"
        status = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)
        self.wait_ended()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self._signal(signal.SIGTERM)
        return self.wait_ended()

    def pause(self) -> None:
        """SIGSTOP: it hangs, connected."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the service was never started"
        self._process.send_signal(number)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None, "the process was started with a pipe"
        with process.stderr:
            for line in process.stderr:
                with self._news:
                    self._lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._at_end = True
            self._news.notify_all()


class Fleet:
    """Named services, each started when it is first asked for and kept for the tests that follow; one that was killed is started again.

    Args:
        folder: for sockets; short.
        configs: of each service by name; `listen` is replaced.
    """

    def __init__(self, folder: Path, configs: dict[str, VerifierConfig | DrafterConfig]) -> None:
        self._services = {name: Service(dataclasses.replace(config, listen=(f"unix:{folder}/{name}",))) for name, config in configs.items()}

    def start(self, *names: str) -> list[Service]:
        """Starts those that do not run, side by side, and returns at once."""
        services = [self._services[name] for name in names]
        for service in services:
            if not service.is_running:
                service.start()
        return services

    def get(self, *names: str) -> list[Service]:
        """The services, ready. They start side by side."""
        services = self.start(*names)
        for service in services:
            service.wait_ready()
        return services

    def stop(self) -> None:
        """Ends all of them."""
        for service in self._services.values():
            if service.is_running:
                service.kill()


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """A coordinator in this process, on a socket, and a client of it."""

    engine: Engine
    client: AsyncClient
    address: str


@asynccontextmanager
async def coordinate(
    socket_dir: Path, verifiers: Sequence[str], drafters: Sequence[str] = (), *, speculation: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[Stack]:
    """A coordinator over these addresses, ready, with every drafter connected to every lane.

    Args:
        speculation: speculative_config as users write it.
        fields: of CoordinatorConfig. Unless given, a step waits for drafts as long as they take: tests of what happens to drafts must not
            depend on how busy the machine is.
    """
    fields = {"min_draft_wait_ms": 60_000.0} | fields
    config = CoordinatorConfig(
        listen=(f"unix:{socket_dir}/coordinator",), verifiers=tuple(verifiers), drafters=tuple(drafters),
        speculative_config=SpeculativeConfig.from_dict(speculation or {}), **fields,
    )  # fmt: skip
    async with serve_engine(config) as stack:
        await stack.client.wait_ready()
        for lane in stack.engine.lanes:
            while not all(link.is_usable for link in lane.links):
                await lane.something_new()
        yield stack


@asynccontextmanager
async def serve_engine(config: CoordinatorConfig) -> AsyncIterator[Stack]:
    """A coordinator in this process, ready or not."""
    engine = Engine(config)
    server = CoordinatorServer(engine, config)
    await server.start()
    following = None
    try:
        await engine.start()
        following = asyncio.create_task(server.follow_readiness())
        async with AsyncClient(config.listen[0]) as client:
            yield Stack(engine, client, config.listen[0])
    finally:
        await asyncio.gather(engine.stop(0.5), server.stop(1.0))
        if following is not None:
            following.cancel()


@asynccontextmanager
async def serve_verifier(socket_dir: Path, config: VerifierConfig, *, name: str = "verifier") -> AsyncIterator[tuple[LoadedVerifier, str]]:
    """A verifier in this process, for tests that look into it, and its address."""
    loaded: list[LoadedVerifier] = []

    def load() -> LoadedVerifier:
        loaded.append(load_verifier(config, name))
        return loaded[0]

    address = f"unix:{socket_dir}/{name}"
    tracer = open_tracer("verifier", name, endpoint=config.trace_endpoint, file=config.trace_file)
    server = VerifierServer([address], load, name, config.max_outstanding_rounds, config.max_message_mb << 20, tracer)
    await server.start()
    try:
        await server.load()
        yield loaded[0], address
    finally:
        await server.stop(1.0)
