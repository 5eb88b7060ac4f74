"""How requests of the asynchronous client end before their time: deadlines, streams that are left, clients that are closed or whose loop is gone."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from specwire import AsyncClient
from specwire.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
    UnsupportedError,
)
from specwire.messages import ErrorStatus
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving
from tests.waiting import until

# --- deadlines ------------------------------------------------------------------------------------------------------


async def test_deadlines(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    ids_engine.is_paused = True
    with pytest.raises(DeadlineExceededError, match=r"within 0\.1 s"):
        await ids_client.generate([1], timeout=0.1)
    stream = ids_client.stream([1], timeout=0.1)
    with pytest.raises(DeadlineExceededError, match=r"within 0\.1 s"):
        await anext(stream)
    await until(lambda: not ids_engine.live)
    assert all(0 < (scripted.request.timeout_ms or 0) <= 100 for scripted in ids_engine.requests)
    ids_engine.is_paused = False
    assert (await ids_client.generate([5, 0], timeout=60, max_tokens=2)).token_ids == [1, 2]


async def test_the_servers_deadline_keeps_its_message(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    ids_engine.is_paused = True
    running = asyncio.create_task(ids_client.generate([1], timeout=60))
    await until(lambda: len(ids_engine.live) == 1)
    ids_engine.live[0].fail(ErrorStatus(4, "the deadline passed after 17 tokens"))
    with pytest.raises(DeadlineExceededError, match="after 17 tokens"):
        await running


# --- leaving early --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["break", "aclose", "async with", "exception", "task before", "task after", "forgotten"])
async def test_leaving_a_stream_cancels_it(ids_client: AsyncClient, ids_engine: ScriptedEngine, way: str) -> None:
    ids_engine.vocab_size = 1 << 30

    async def read(stop_after: int) -> None:
        stream = ids_client.stream([1], max_tokens=None)
        if way == "async with":
            async with stream:
                await anext(stream)
            return
        if way == "forgotten":
            await anext(stream)
            return
        count = 0
        async for _ in stream:
            count += 1
            if count == stop_after:
                break
        if way == "aclose":
            await stream.aclose()
            await stream.aclose()
            assert [event async for event in stream] == []
        if way == "exception":
            raise ZeroDivisionError

    if way == "task before":
        ids_engine.is_paused = True
    reading = asyncio.create_task(read(3 if not way.startswith("task") else -1))
    if way.startswith("task"):
        await until(lambda: len(ids_engine.live) == 1 and (ids_engine.is_paused or ids_engine.num_steps > 3))
        reading.cancel()
    outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
    assert isinstance(outcome, {"exception": ZeroDivisionError}.get(way, asyncio.CancelledError if way.startswith("task") else type(None)))
    del outcome, reading
    gc.collect()
    await until(lambda: not ids_engine.live)
    assert [scripted.is_cancelled for scripted in ids_engine.requests] == [True]


async def test_cancelling_generate_cancels_it(client: AsyncClient, engine: ScriptedEngine) -> None:
    """At every moment: before the tokenizer is there, before the request is sent, while it runs."""
    engine.is_paused = True
    for num_turns in range(40):
        task = asyncio.create_task(client.generate("@"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    running = asyncio.create_task(client.generate("@"))
    await until(lambda: len(engine.live) == 1 and not engine.requests[-1].is_cancelled)
    running.cancel()
    await until(lambda: not engine.live)
    assert client._attempts._connection is not None
    assert not client._attempts._connection.session._live


async def test_a_stream_that_is_never_read_starts_nothing(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    stream = ids_client.stream([1])
    await stream.aclose()
    del stream
    assert [event async for event in ids_client.stream([1], max_tokens=1)][-1].finish_reason == "length"
    assert len(ids_engine.requests) == 1


# --- life and loops -------------------------------------------------------------------------------------------------


async def test_close_fails_what_runs_and_is_idempotent(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    ids_engine.is_paused = True
    running = asyncio.create_task(ids_client.generate([1]))
    stream = ids_client.stream([1])
    reading = asyncio.create_task(anext(stream))
    await until(lambda: len(ids_engine.live) == 2)
    await ids_client.close()
    await ids_client.close()
    for task in (running, reading):
        with pytest.raises(UnavailableError, match="the client was closed"):
            await task
    await until(lambda: not ids_engine.live)
    with pytest.raises(FailedPreconditionError, match="the client is closed"):
        await ids_client.generate([1])


async def test_close_at_any_moment_fails_a_request_that_begins(engine: ScriptedEngine, socket_dir: Path) -> None:
    """Also while the tokenizer is fetched and loaded, before there is a session."""
    async with serving(engine, socket_dir) as server:
        engine.is_paused = True
        for num_turns in range(60):
            client = AsyncClient(server.bound_addresses[0])
            tasks = [asyncio.create_task(client.generate("so @")) for _ in range(2)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await client.close()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, (UnavailableError, FailedPreconditionError)), repr(outcome)
                assert "closed" in str(outcome)
            await until(lambda: not engine.live)


async def test_close_right_after_a_start_fails_the_request(ids_client: AsyncClient) -> None:
    """The task that reads the session has not run yet."""
    with pytest.raises(UnsupportedError):
        await ids_client.get_tokenizer()
    running = asyncio.create_task(ids_client.generate([1]))
    await asyncio.sleep(0)
    await ids_client.close()
    with pytest.raises(UnavailableError, match="the client was closed"):
        await asyncio.wait_for(running, 60)


async def test_a_client_of_another_loop_says_so(ids_client: AsyncClient) -> None:
    await ids_client.generate([1, 0], max_tokens=1)

    def other_loop() -> str:
        try:
            asyncio.run(ids_client.generate([1, 0]))
        except FailedPreconditionError as error:
            return str(error)
        return ""

    assert "belongs to another event loop" in await asyncio.to_thread(other_loop)


async def test_a_client_from_before_a_fork_says_so(ids_client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await ids_client.generate([1, 0], max_tokens=1)
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(FailedPreconditionError, match="before a fork"):
            await ids_client.generate([1, 0])


def test_streams_and_clients_outlive_their_loop(socket_dir: Path) -> None:
    """Nothing raises or warns when they are collected after their loop has gone."""

    async def use() -> tuple[AsyncClient, object]:
        engine = ScriptedEngine()
        async with serving(engine, socket_dir) as server:
            client = AsyncClient(server.bound_addresses[0])
            stream = client.stream([1, 0], max_tokens=1000)
            await anext(stream)
            return client, stream

    client, stream = asyncio.run(use())
    del stream
    gc.collect()
    asyncio.run(client.close())
    asyncio.run(client.close())
