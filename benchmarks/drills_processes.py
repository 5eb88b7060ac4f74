"""Services of a drill: processes that are killed, stopped and replaced, with their log lines as events."""

import asyncio
import signal
from collections.abc import Callable

from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig, flags
from specwire.launch import ServiceProcess, ServiceSpec

_TIMEOUT_S = 120.0
_MODULES = {VerifierConfig: "verifier_svc", DrafterConfig: "drafter_svc", CoordinatorConfig: "coordinator"}
Config = VerifierConfig | DrafterConfig | CoordinatorConfig


class Service:
    """One address and what serves there, as the child processes of `specwire up`; its log through all restarts.

    Args:
        name: for messages.
        what: a service's configuration, or the module and arguments of another program.
        restart_s: pause between its end and its restart; half a second is the supervisor's.
    """

    def __init__(self, name: str, address: str, what: "Config | tuple[str, ...]", restart_s: float = 0.5) -> None:
        self.name = name
        self.address = address
        self.restart_s = restart_s
        self.lines: list[str] = []
        self._news = asyncio.Event()
        self._process = self._make(what)

    async def start(self) -> None:
        """Returns once it has started; see `ready`."""
        await self._process.start()

    async def ready(self, since: int = 0) -> None:
        """Returns once it has said, after its first `since` lines, that it serves."""
        await self.wait_for("ready: ", since)

    async def serving(self) -> None:
        """Returns once its health service says so."""
        async with asyncio.timeout(_TIMEOUT_S):
            await self._process.wait_serving()

    async def wait_for(self, text: str, since: int = 0) -> str:
        """The first line after `since` lines that has the text."""
        return await self._find(lambda: next((line for line in self.lines[since:] if text in line), ""), text)

    async def kill(self) -> None:
        """SIGKILL, and its end."""
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait_ended()

    async def restart(self) -> None:
        """Starts it again after its end, as a supervisor does; returns once it serves."""
        since = len(self.lines)
        await asyncio.sleep(self.restart_s)
        await self.start()
        await self.ready(since)

    async def replace(self, what: "Config | tuple[str, ...]") -> str:
        """SIGTERM, and something else at the same address; how the old process ended."""
        self._process.send_signal(signal.SIGTERM)
        ended = await self._process.wait_ended()
        self._process = self._make(what)
        since = len(self.lines)
        await self.start()
        await self.ready(since)
        return ended

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stop(self) -> None:
        """Whatever state it is in."""
        self._process.send_signal(signal.SIGCONT)
        await self._process.stop(5.0)

    def _make(self, what: "Config | tuple[str, ...]") -> ServiceProcess:
        module, *arguments = what if isinstance(what, tuple) else (_MODULES[type(what)], *flags(what))
        return ServiceProcess(ServiceSpec(self.name, module, tuple(arguments), self.address), self._take)

    def _take(self, name: str, line: str) -> None:
        self.lines.append(line)
        self._news.set()

    async def _find(self, look: Callable[[], str], text: str) -> str:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not (found := look()):
                    self._news.clear()
                    await self._news.wait()
                return found
        except TimeoutError:
            raise TimeoutError(f"{self.name} did not write {text!r} within {_TIMEOUT_S:g} s:\n" + "\n".join(self.lines[-20:])) from None
