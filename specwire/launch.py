"""Services as child processes: start, wait until healthy, collect their logs, restart, stop in order; none outlives this process."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specwire import rpc
from specwire.child_watcher import watch_children_without_threads
from specwire.errors import UnavailableError
from specwire.launch_failure import explain_failed_start

logger = logging.getLogger(__name__)

LineSink = Callable[[str, str], None]
"""Takes the name of a service and one line of its log, without the line's end."""
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One child process.

    Args:
        name: its name in logs and messages.
        module: what `python -m` runs.
        arguments: the module's command line.
        address: where its health service answers.
        essential: its end is the end of everything; other services are restarted.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    address: str
    essential: bool = False


class ServiceProcess:
    """The process of one service, through its restarts."""

    def __init__(self, spec: ServiceSpec, on_line: LineSink) -> None:
        self.spec = spec
        self._on_line = on_line
        self._has_written = False
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The running process, if there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Starts the process in a session of its own: a terminal's Ctrl-C reaches this process alone, which stops the others in order.

        Raises:
            UnavailableError: this machine, user or container can't have another process.
        """
        watch_children_without_threads()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "specwire.child", str(os.getpid()), self.spec.module, *self.spec.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:
            explained = explain_failed_start(self.spec.name, error)
            if explained is None:
                raise
            raise explained from error
        self._has_written = False
        self._reader = asyncio.create_task(self._read_lines(self._process))

    async def wait_serving(self) -> None:
        """Returns once the service's health is SERVING, however long that takes."""
        async with rpc.open_channel(self.spec.address) as channel:
            await rpc.wait_serving(channel)

    async def wait_ended(self) -> str:
        """Waits for the process to end and its last line to be read; says how it ended."""
        assert self._process is not None, f"{self.spec.name} was never started"
        assert self._reader is not None, f"{self.spec.name} has a process, but nothing reads its output"
        code = await self._process.wait()
        # Shielded, since this may be cancelled; bounded, since a process that it left behind can hold the pipe open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), timeout=1.0)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL if it still runs after grace_s."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), timeout=grace_s)
        except TimeoutError:
            logger.warning("%s did not stop within %g s and is killed", self.spec.name, grace_s)
            self.send_signal(signal.SIGKILL)
        await self.wait_ended()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def where_to_look(self) -> str:
        """Appended to a message: its own lines say why, and `on_line` has had them already."""
        return "; its own lines say why" if self._has_written else " and wrote nothing"

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "the process was started without a pipe"
        pending = b""
        while chunk := await process.stdout.read(_MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._take_line(line)
        if pending:
            self._take_line(pending)

    def _take_line(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self._has_written = True
        self._on_line(self.spec.name, text)


class Supervisor:
    """Keeps groups of services running.

    Args:
        groups: services in the order of starting; a group starts when the one before it is healthy, and stops before it.
        on_line: takes the services' log lines.
        startup_timeout_s: how long a service may take until it is healthy.
        grace_s: how long a service may take to stop.
        first_backoff_s, max_backoff_s: pause before a restart; it doubles while a service keeps ending soon after its start.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ServiceSpec]],
        on_line: LineSink,
        *,
        startup_timeout_s: float = 600.0,
        grace_s: float = 15.0,
        first_backoff_s: float = 0.5,
        max_backoff_s: float = 30.0,
    ) -> None:
        self.groups = [[ServiceProcess(spec, on_line) for spec in group] for group in groups]
        self._startup_timeout_s = startup_timeout_s
        self._grace_s = grace_s
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
        self.awaited = ""
        """The service that the start waits for; empty before and after it."""

    async def start(self) -> None:
        """Starts every service and returns once all are healthy.

        Raises:
            UnavailableError: a service can't be started, ended, or is not healthy in time; `stop` the others then.
        """
        started: list[ServiceProcess] = []
        for group in self.groups:
            for service in group:
                await service.start()
            started += group
            ready = asyncio.create_task(self._wait_serving(group))
            # A service of an earlier group that ends now could leave this one waiting for ever.
            ended = asyncio.create_task(_first_end(started))
            try:
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    service, outcome = ended.result()
                    raise UnavailableError(f"{service.spec.name} ended with {outcome} before everything was ready{service.where_to_look}")
                ready.result()
            finally:
                await _cancel([ready, ended])

    async def watch(self) -> None:
        """Restarts services that end; never returns.

        Raises:
            UnavailableError: an essential service ended.
        """
        tasks = [asyncio.create_task(self._keep(service)) for group in self.groups for service in group]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            await _cancel(tasks)

    async def stop(self) -> None:
        """Stops the groups in the reverse order of their start."""
        for group in reversed(self.groups):
            await asyncio.gather(*(service.stop(self._grace_s) for service in group))

    def kill(self) -> None:
        """Ends everything now."""
        for group in self.groups:
            for service in group:
                service.send_signal(signal.SIGKILL)

    async def _wait_serving(self, group: Sequence[ServiceProcess]) -> None:
        try:
            for service in group:
                self.awaited = service.spec.name
                await self._wait_for(service)
        finally:
            self.awaited = ""

    async def _wait_for(self, service: ServiceProcess) -> None:
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                await service.wait_serving()
        except TimeoutError:
            raise UnavailableError(f"{service.spec.name} is not ready after {self._startup_timeout_s:g} s{service.where_to_look}") from None

    async def _keep(self, service: ServiceProcess) -> None:
        backoff_s = self._first_backoff_s
        while True:
            started = time.monotonic()
            outcome = await service.wait_ended()
            if service.spec.essential:
                raise UnavailableError(f"{service.spec.name} ended with {outcome}")
            if time.monotonic() - started > 2 * self._max_backoff_s:
                backoff_s = self._first_backoff_s
            logger.warning("%s ended with %s and is restarted in %g s", service.spec.name, outcome, backoff_s)
            is_started = False
            while not is_started:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._max_backoff_s)
                is_started = await _start_again(service, backoff_s)


async def _start_again(service: ServiceProcess, backoff_s: float) -> bool:
    """Whether it could be; what keeps it from it may pass."""
    try:
        await service.start()
    except UnavailableError as error:
        logger.warning("%s; tried again in %g s", error, backoff_s)
        return False
    return True


async def _first_end(services: Sequence[ServiceProcess]) -> tuple[ServiceProcess, str]:
    """The service that ends first, and how."""
    tasks = {asyncio.create_task(service.wait_ended()): service for service in services}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        return tasks[task], task.result()
    finally:
        await _cancel(list(tasks))


async def _cancel(tasks: Sequence[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
