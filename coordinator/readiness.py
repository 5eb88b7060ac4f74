"""Whether the coordinator takes requests."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple


class Readiness(NamedTuple):
    """Whether requests are taken, and what is missing."""

    is_ready: bool
    reason: str


class ReadinessWatch:
    """Wakes whoever waits for a change of readiness; bounds how long requests wait once no verifier is there.

    Args:
        verifier_wait_s: so long after the last verifier was there `on_loss` is called, unless one comes back.
    """

    def __init__(self, verifier_wait_s: float, on_loss: Callable[[], None]) -> None:
        self._verifier_wait_s = verifier_wait_s
        self._on_loss = on_loss
        self._last = Readiness(False, "not started")
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def changed(self) -> None:
        """Returns at the next change; any number of tasks may wait."""
        await self._event.wait()

    def look(self, ready: Readiness, *, has_verifier: bool) -> None:
        """To be called when anything may have changed."""
        if ready != self._last:
            self._last = ready
            self._event.set()
            self._event = asyncio.Event()
        if has_verifier:
            self.stop()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._verifier_wait_s, self._waited_too_long)

    def stop(self) -> None:
        """Nobody is to be told of a loss."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited_too_long(self) -> None:
        self._timer = None
        self._on_loss()
