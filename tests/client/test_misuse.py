"""Clients used where or when they can't be: a typed error that says so, and never a hang, whatever is called."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specwire import AsyncClient, Client
from specwire.errors import FailedPreconditionError, UnavailableError
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "@"}]
ASYNC_CALLS: dict[str, Callable[[AsyncClient], Awaitable[Any]]] = {
    "generate": lambda client: client.generate("@"),
    "generate ids": lambda client: client.generate([64]),
    "stream": lambda client: anext(client.stream("@")),
    "chat": lambda client: client.chat(MESSAGES),
    "chat_stream": lambda client: anext(client.chat_stream(MESSAGES)),
    "generate_batch": lambda client: anext(client.generate_batch(["@"])),
    "get_tokenizer": lambda client: client.get_tokenizer(),
    "wait_ready": lambda client: client.wait_ready(1),
}
SYNC_CALLS: dict[str, Callable[[Client], Any]] = {
    "generate": lambda client: client.generate("@"),
    "stream": lambda client: next(client.stream("@")),
    "chat": lambda client: client.chat(MESSAGES),
    "chat_stream": lambda client: next(client.chat_stream(MESSAGES)),
    "generate_batch": lambda client: next(client.generate_batch(["@"])),
    "get_tokenizer": lambda client: client.get_tokenizer(),
    "wait_ready": lambda client: client.wait_ready(1),
}


@pytest.fixture
async def engine() -> ScriptedEngine:
    engine = ScriptedEngine(make_spec())
    engine.eos_token_ids, engine.vocab_size = (), 1 << 30
    return engine


@pytest.fixture
async def address(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[str]:
    async with serving(engine, socket_dir) as server:
        yield server.bound_addresses[0]


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    """Used before, so that it belongs to this loop."""
    async with AsyncClient(address) as client:
        await client.generate([64], max_tokens=1)
        yield client


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """As after a fork; a real one would take gRPC's threads away from the test too."""
    with mock.patch("os.getpid", return_value=os.getpid() + 1):
        yield


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_closed(client: AsyncClient, call: str) -> None:
    await client.close()
    with pytest.raises(FailedPreconditionError, match="the client is closed; make a new one"):
        await ASYNC_CALLS[call](client)


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_another_loop(client: AsyncClient, call: str) -> None:
    async def use() -> None:
        with pytest.raises(FailedPreconditionError, match="belongs to another event loop; make one per loop"):
            await ASYNC_CALLS[call](client)

    await asyncio.to_thread(asyncio.run, use())
    assert (await client.generate("@", max_tokens=2)).text == "AB"


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_forked(client: AsyncClient, call: str) -> None:
    with forked(), pytest.raises(FailedPreconditionError, match=r"before a fork; gRPC was used before it too: start processes by spawn"):
        await ASYNC_CALLS[call](client)


async def test_a_new_client_after_a_fork(client: AsyncClient) -> None:
    """gRPC was used before it, so that a new client does not work either."""
    with forked(), pytest.raises(FailedPreconditionError, match=r"process \d+ used a client before .* start processes by spawn"):
        await AsyncClient("127.0.0.1:1").generate("@")
    assert (await client.generate("@", max_tokens=2)).text == "AB"


@pytest.mark.parametrize("kind", ["stream", "generate_batch"])
async def test_a_running_iterator_elsewhere(client: AsyncClient, engine: ScriptedEngine, kind: str) -> None:
    """Reading it is refused and leaves it as it was; closing it elsewhere ends it where it lives."""
    iterator: Any
    if kind == "stream":
        iterator = client.stream("@", max_tokens=None)
    else:
        iterator = client.generate_batch(["@"] * 3, max_tokens=None)
        engine.requests.clear()
        asyncio.get_running_loop().call_later(0.05, lambda: engine.live[0].cancel())  # the first of the batch ends
    await anext(iterator)

    async def read() -> None:
        with pytest.raises(FailedPreconditionError, match="belongs to another event loop"):
            await anext(iterator)

    await asyncio.to_thread(asyncio.run, read())
    with forked(), pytest.raises(FailedPreconditionError, match="before a fork"):
        await anext(iterator)
    assert engine.live
    await asyncio.to_thread(asyncio.run, iterator.aclose())
    await until(lambda: not engine.live)


async def test_two_readers_of_one_stream(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.is_paused = True
    stream = client.stream("@", max_tokens=8)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: len(engine.live) == 1)
    with pytest.raises(FailedPreconditionError, match="another task reads this stream"):
        await anext(stream)
    engine.is_paused = False
    engine.wake()
    text = (await first).text + "".join([event.text async for event in stream])
    assert (text, len(engine.requests)) == ("ABCDEFGH", 2)


# --- the blocking client --------------------------------------------------------------------------------------------


@pytest.fixture
async def blocking(address: str) -> AsyncIterator[Client]:
    """Its server runs on the test's loop, so it is used from other threads."""
    client = Client(address)
    await asyncio.to_thread(client.generate, [64], max_tokens=1)
    yield client
    await asyncio.to_thread(client.close)


@pytest.mark.parametrize("call", SYNC_CALLS)
async def test_blocking_closed(blocking: Client, call: str) -> None:
    await asyncio.to_thread(blocking.close)
    with pytest.raises(FailedPreconditionError, match="the client is closed; make a new one"):
        SYNC_CALLS[call](blocking)


@pytest.mark.parametrize("call", SYNC_CALLS)
async def test_blocking_forked(blocking: Client, call: str) -> None:
    with forked(), pytest.raises(FailedPreconditionError, match="before a fork"):
        SYNC_CALLS[call](blocking)


@pytest.mark.parametrize("call", SYNC_CALLS)
async def test_blocking_on_its_own_thread(blocking: Client, call: str) -> None:
    """As a finalizer may do it: it would wait for itself."""
    outcome: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def use() -> None:
        try:
            SYNC_CALLS[call](blocking)
        except BaseException as error:
            loop.call_soon_threadsafe(outcome.set_result, error)

    blocking._loop.call_soon_threadsafe(use)
    error = await outcome
    assert isinstance(error, FailedPreconditionError)
    assert "on its own thread" in str(error)


async def test_blocking_closed_in_the_middle_of_a_batch(blocking: Client, engine: ScriptedEngine) -> None:
    """A batch in another thread ends with the error, and the thread with it."""
    engine.is_paused = True
    outcomes: list[Any] = []

    def read() -> None:
        try:
            outcomes.extend(blocking.generate_batch(["@"] * 3))
        except (UnavailableError, FailedPreconditionError) as error:
            outcomes.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    await until(lambda: len(engine.live) == 3)
    await asyncio.to_thread(blocking.close)
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    assert isinstance(outcomes[-1], (UnavailableError, FailedPreconditionError))
    await until(lambda: not engine.live)
