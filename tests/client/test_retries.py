"""Sending again: only what has given nothing, only after errors that pass, a bounded number of times, inside the deadline."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from specwire import AsyncClient, GenerationResult
from specwire.client.connection import Connection
from specwire.client.generation import Deadline, Retries
from specwire.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SpecwireError,
    UnavailableError,
    UnsupportedError,
)
from specwire.messages import ErrorStatus
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving
from tests.waiting import until

UNAVAILABLE = ErrorStatus(14, "no verifier is there")
Pauses = list[float]


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine(make_spec())


@pytest.fixture
async def client(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[AsyncClient]:
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0]) as client:
        yield client


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Pauses are noted and not waited for."""
    noted: Pauses = []

    async def pause(self: Connection, seconds: float) -> None:
        noted.append(seconds)

    monkeypatch.setattr(Connection, "pause", pause)
    return noted


async def generate(client: AsyncClient, **arguments: Any) -> str:
    return (await client.generate("@", max_tokens=6, **arguments)).text


async def stream(client: AsyncClient, **arguments: Any) -> str:
    return "".join([event.text async for event in client.stream("@", max_tokens=6, **arguments)])


WAYS = pytest.mark.parametrize("way", [generate, stream])
Way = Callable[..., Awaitable[str]]


async def fail_live(engine: ScriptedEngine, error: ErrorStatus, times: int) -> None:
    """Fails the request that runs, and those that come after it."""
    for number in range(times):
        await until(lambda number=number: len(engine.requests) == number + 1 and len(engine.live) == 1)
        engine.live[0].fail(error)


# --- the policy -----------------------------------------------------------------------------------------------------


def test_pauses_grow_and_differ() -> None:
    retries = Retries(5)
    limits = [(0.25, 0.5), (1.0, 2.0), (4.0, 8.0), (4.0, 8.0), (4.0, 8.0)]
    for number, (low, high) in enumerate(limits, start=1):
        pauses = [retries.pause_s(UnavailableError("x"), number, Deadline(None), waits_for_room=True) for _ in range(50)]
        assert all(pause is not None and low <= pause <= high for pause in pauses)
        assert len(set(pauses)) > 10
    assert retries.pause_s(UnavailableError("x"), 6, Deadline(None), waits_for_room=True) is None


def test_the_coordinator_says_when_to_come_back() -> None:
    full = ResourceExhaustedError("x", retry_after_ms=3000)
    pause = Retries(1).pause_s(full, 1, Deadline(None), waits_for_room=True)
    assert pause is not None
    assert 3.25 <= pause <= 3.5
    assert Retries(1).pause_s(full, 1, Deadline(None), waits_for_room=False) is None
    assert Retries(1).pause_s(full, 1, Deadline(3.0), waits_for_room=True) is None


@pytest.mark.parametrize(
    "error",
    [InvalidArgumentError, FailedPreconditionError, ResourceExhaustedError, UnsupportedError, DeadlineExceededError, CancelledError, InternalError],
)
def test_errors_that_do_not_pass(error: type[SpecwireError]) -> None:
    assert Retries(5).pause_s(error("x"), 1, Deadline(None), waits_for_room=True) is None


# --- requests -------------------------------------------------------------------------------------------------------


@WAYS
async def test_a_request_without_a_token_is_sent_again(
    client: AsyncClient, engine: ScriptedEngine, pauses: Pauses, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "specwire.client")
    engine.is_paused = True
    running = asyncio.create_task(way(client))  # type: ignore[arg-type]
    await fail_live(engine, UNAVAILABLE, 2)
    await until(lambda: len(engine.live) == 1)
    engine.is_paused = False
    engine.wake()
    assert await running == "ABCDEF"
    assert (len(engine.requests), client.num_retries, len(pauses)) == (3, 2, 2)
    assert engine.requests[0].request.sampling == engine.requests[2].request.sampling
    lines = [record for record in caplog.records if "no verifier is there" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.DEBUG] * 2


@WAYS
async def test_the_number_of_attempts_is_bounded(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses, way: Way) -> None:
    engine.is_paused = True
    running = asyncio.create_task(way(client))  # type: ignore[arg-type]
    await fail_live(engine, UNAVAILABLE, 3)
    with pytest.raises(UnavailableError, match="no verifier"):
        await running
    assert (len(engine.requests), client.num_retries) == (3, 2)


@WAYS
async def test_without_retries(engine: ScriptedEngine, socket_dir: Path, pauses: Pauses, way: Way) -> None:
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0], max_retries=0) as client:
        engine.is_paused = True
        running = asyncio.create_task(way(client))  # type: ignore[arg-type]
        await fail_live(engine, UNAVAILABLE, 1)
        with pytest.raises(UnavailableError):
            await running
        assert (len(engine.requests), client.num_retries, pauses) == (1, 0, [])


async def test_a_stream_never_goes_on_after_a_token(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses) -> None:
    engine.is_paused = True
    running = asyncio.create_task(stream(client))
    await until(lambda: len(engine.live) == 1)
    engine.step()
    engine.live[0].fail(UNAVAILABLE)
    with pytest.raises(UnavailableError):
        await running
    assert (len(engine.requests), client.num_retries, pauses) == (1, 0, [])


async def in_batch(client: AsyncClient) -> str:
    [(_, outcome)] = [each async for each in client.generate_batch(["@"], max_tokens=6)]
    assert isinstance(outcome, GenerationResult)
    return outcome.text


@pytest.mark.parametrize("way", [generate, in_batch])
async def test_an_answer_that_nobody_has_seen_begins_again(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses, way: Way) -> None:
    engine.is_paused = True
    running = asyncio.create_task(way(client))  # type: ignore[arg-type]
    await until(lambda: len(engine.live) == 1)
    engine.step()
    engine.live[0].fail(UNAVAILABLE)
    await until(lambda: len(engine.live) == 1 and len(engine.requests) == 2)
    engine.is_paused = False
    engine.wake()
    assert await running == "ABCDEF"
    assert (client.num_retries, len(pauses)) == (1, 1)


@WAYS
async def test_other_errors_end_the_request(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses, way: Way) -> None:
    engine.is_paused = True
    running = asyncio.create_task(way(client))  # type: ignore[arg-type]
    await fail_live(engine, ErrorStatus(13, "a fault"), 1)
    with pytest.raises(InternalError):
        await running
    assert (len(engine.requests), pauses) == (1, [])


@WAYS
async def test_a_full_queue_with_and_without_a_time_to_come_back(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses, way: Way) -> None:
    engine.max_queue = 0
    with pytest.raises(ResourceExhaustedError) as failure:
        await way(client)
    assert (failure.value.retry_after_ms, engine.num_refused, pauses) == (None, 1, [])
    engine.retry_after_ms = 700
    with pytest.raises(ResourceExhaustedError) as failure:
        await way(client)
    assert (failure.value.retry_after_ms, engine.num_refused) == (700, 4)
    assert all(pause > 0.7 for pause in pauses)


@WAYS
async def test_no_pause_goes_beyond_the_deadline(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses, way: Way) -> None:
    """The error comes at once, since nothing could be gained by waiting."""
    engine.max_queue, engine.retry_after_ms = 0, 60_000
    with pytest.raises(ResourceExhaustedError):
        await way(client, timeout=60)
    assert (engine.num_refused, pauses) == (1, [])


async def test_attempts_share_the_deadline(client: AsyncClient, engine: ScriptedEngine, pauses: Pauses) -> None:
    engine.is_paused = True
    running = asyncio.create_task(generate(client, timeout=50))
    await fail_live(engine, UNAVAILABLE, 1)
    await until(lambda: len(engine.live) == 1)
    first, second = (scripted.request.timeout_ms for scripted in engine.requests)
    assert first is not None
    assert second is not None
    assert second <= first <= 50_000
    running.cancel()


async def test_leaving_during_a_pause(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.max_queue, engine.retry_after_ms = 0, 60_000
    for close in (False, True):
        running = [asyncio.create_task(way(client)) for way in (generate, stream)]
        before = engine.num_refused
        await until(lambda before=before: engine.num_refused == before + 2)
        await asyncio.sleep(0.01)  # the refusals arrive
        if close:
            await client.close()
        for task in running:
            if not close:
                task.cancel()
            with pytest.raises(UnavailableError if close else asyncio.CancelledError):
                await task
    assert engine.requests == []


async def test_the_tokenizer_is_asked_for_again(client: AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a coordinator that does not know it yet, and does after the pause."""
    tokenizer, engine.tokenizer = engine.tokenizer, None
    engine.ready = engine.ready._replace(is_ready=False)

    async def pause(self: Connection, seconds: float) -> None:
        engine.tokenizer = tokenizer

    monkeypatch.setattr(Connection, "pause", pause)
    assert (await client.get_tokenizer()).encode("a") == [97]
    assert client.num_retries == 1


# --- coordinators that come and go ----------------------------------------------------------------------------------


@WAYS
async def test_a_coordinator_that_starts_during_the_pause(socket_dir: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """With the real pauses: the last attempt comes later than any two attempts of the channel to connect are apart."""
    started, stop = asyncio.Event(), asyncio.Event()
    pause = Connection.pause

    async def serve() -> None:
        async with serving(ScriptedEngine(make_spec()), socket_dir):
            started.set()
            await stop.wait()

    async def start_and_pause(self: Connection, seconds: float) -> None:
        if not tasks:
            tasks.append(asyncio.create_task(serve()))
            await started.wait()
        await pause(self, seconds)

    tasks: list[asyncio.Task[None]] = []
    monkeypatch.setattr(Connection, "pause", start_and_pause)
    async with AsyncClient(f"unix:{socket_dir}/coordinator.sock") as client:
        assert await way(client) == "ABCDEF"
        assert client.num_retries in (1, 2)
    stop.set()
    await asyncio.gather(*tasks)
