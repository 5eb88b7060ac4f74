"""An event loop whose clock jumps to the next timer: seconds of waiting take none, and every time is exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0; what waits for anything but timers fails."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, f"at {self._loop.now_s} s everything waits, and no timer runs"
            self._loop.now_s += max(0.0, timeout)
        return events


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
