"""Failures that nobody waits for any more."""

import asyncio
import gc
from concurrent.futures import Future

import pytest

from specwire.futures import unwatched


async def test_a_failure_after_the_last_waiter_has_gone_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As a service waits for its thread's failure until it stops."""
    broken: Future[None] = Future()

    async def wait(broken: Future[None]) -> None:
        await asyncio.shield(unwatched(asyncio.wrap_future(broken)))

    waiting = asyncio.create_task(wait(broken))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    broken.set_exception(RuntimeError("device lost"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del waiting, broken
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


async def test_whoever_waits_gets_the_failure() -> None:
    future: asyncio.Future[None] = unwatched(asyncio.get_running_loop().create_future())
    future.set_exception(RuntimeError("device lost"))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="device lost"):
        await future
