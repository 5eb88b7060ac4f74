"""The services as processes, as `specwire up` starts them: alone, so that one coordinator can follow another at the same verifier."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig, flags
from specwire.launch import ServiceSpec, Supervisor

_MODULES = {VerifierConfig: "verifier_svc", DrafterConfig: "drafter_svc", CoordinatorConfig: "coordinator"}
_STARTUP_TIMEOUT_S = 400.0
_LINE_TIMEOUT_S = 30.0
Config = VerifierConfig | DrafterConfig | CoordinatorConfig


@dataclass(slots=True)
class Log:
    """What services wrote: (seconds since the log's start, service, line). Warnings and errors are printed at once."""

    started_s: float = field(default_factory=time.monotonic)
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started_s

    async def wait_for(self, text: str, since: int) -> None:
        """Returns once one of the lines after the first `since` ones has the text.

        Raises:
            TimeoutError: not within 30 seconds.
        """
        async with asyncio.timeout(_LINE_TIMEOUT_S):
            while not any(text in line for _, _, line in self.lines[since:]):
                self.news.clear()
                await self.news.wait()

    def take(self, service: str, line: str) -> None:
        self.lines.append((self.seconds, service, line))
        self.news.set()
        if " INFO " not in line:
            print(f"{service}: {line}", flush=True)


@contextlib.asynccontextmanager
async def running(*configs: Config, log: Log, command: Sequence[str] = ()) -> AsyncIterator[Supervisor]:
    """Services that start side by side and are healthy inside of this; stopped at its end.

    Args:
        command: a module that takes the service's place, and what its command line has before the flags.
    """
    specs = []
    for config in configs:
        name = _MODULES[type(config)]
        module, *arguments = command or (name,)
        specs.append(ServiceSpec(name, module, (*arguments, "--config=", *flags(config)), config.listen[-1]))
    supervisor = Supervisor([specs], log.take, startup_timeout_s=_STARTUP_TIMEOUT_S)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()
