"""Waiting for what no event announces."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Lets the loop run until something is so."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is inside the code under test
            await asyncio.sleep(0.001)
