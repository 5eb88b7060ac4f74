"""What only holds each other is freed while a service runs."""

import asyncio
import gc
import weakref

from specwire.process import collect_circles


class Thing:
    """Holds itself."""

    def __init__(self) -> None:
        self.own = self


async def test_circles_are_freed_while_the_service_runs() -> None:
    gc.disable()
    collecting = asyncio.create_task(collect_circles(0.01))
    try:
        things = [weakref.ref(Thing()) for _ in range(3)]
        async with asyncio.timeout(30):
            while any(thing() is not None for thing in things):  # noqa: ASYNC110 - the collector has no event
                await asyncio.sleep(0.01)
    finally:
        collecting.cancel()
        gc.enable()
