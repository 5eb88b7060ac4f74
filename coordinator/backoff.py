"""Waiting between attempts to reach a peer."""

import asyncio


class Backoff:
    """Waits first_s, then twice as long each time, at most most_s; `reset` starts again."""

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    async def wait(self) -> None:
        wait_s, self._next_s = self._next_s, min(self._most_s, 2 * self._next_s)
        await asyncio.sleep(wait_s)
