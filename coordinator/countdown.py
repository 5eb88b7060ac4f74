"""One wait for several answers."""

import asyncio


class Countdown:
    """Something to wait for until every drafter that was asked has answered, is late or is lost."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_open = 0

    def add(self) -> None:
        self._num_open += 1

    def done(self) -> None:
        self._num_open -= 1
        if not self._num_open and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        if self._num_open:
            await self._future
