"""Batches: neither more on the way than may be, nor anything left of a batch that was left."""

import asyncio
import contextlib
import gc

import pytest

from specwire import AsyncClient, SamplingParams
from specwire.errors import (
    FailedPreconditionError,
    SpecwireError,
    UnavailableError,
)
from tests.client.batches.collect import collect
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.waiting import until


def watch_live(engine: ScriptedEngine) -> list[int]:
    """Grows by the number of running requests at each step."""
    counts: list[int] = []
    engine.on_step = lambda: counts.append(len(engine.live))
    return counts


# --- room -----------------------------------------------------------------------------------------------------------


async def test_at_most_max_concurrency_run(client: AsyncClient, engine: ScriptedEngine) -> None:
    counts = watch_live(engine)
    outcomes = await collect(client.generate_batch([[1, i] for i in range(50)], max_tokens=12, max_concurrency=7))
    assert [outcomes[i].token_ids for i in range(50)] == [expected_tokens([i], 0, 12, 1000) for i in range(50)]
    assert max(counts) <= 7


async def test_a_reader_that_stops_holds_the_batch_up(client: AsyncClient, engine: ScriptedEngine) -> None:
    batch = client.generate_batch([[1, i] for i in range(50)], max_tokens=4, max_concurrency=5)
    await anext(batch)
    await until(lambda: not engine.live)
    assert len(engine.requests) == 5
    assert len(await collect(batch)) == 49


async def test_a_full_queue_is_waited_for(client: AsyncClient, engine: ScriptedEngine) -> None:
    """Of a queue of 20 that another client fills by half, a batch that would send 64 at once gets along with the rest."""
    engine.max_queue, counts = 20, watch_live(engine)
    others = [client.stream([5], max_tokens=None) for _ in range(10)]
    for stream in others:
        await anext(stream)
    outcomes = await collect(client.generate_batch([[1, i] for i in range(300)], max_tokens=8, max_concurrency=64))
    assert [outcomes[i].token_ids for i in range(300)] == [expected_tokens([i], 0, 8, 1000) for i in range(300)]
    assert engine.num_refused > 0, "the queue was never full"
    assert max(counts) <= 20
    # It comes to know its share: refusals are the exception, though 54 of 64 were refused at first.
    assert engine.num_refused < 54 + 300 / 2
    for stream in others:
        await stream.aclose()


async def test_a_queue_full_of_others_is_waited_for(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.max_queue = 0
    collecting = asyncio.create_task(collect(client.generate_batch([[1, i] for i in range(10)], max_tokens=4)))
    await until(lambda: engine.num_refused > 13)
    assert not collecting.done()
    engine.max_queue = 100
    assert [outcome.token_ids for _, outcome in sorted((await collecting).items())] == [expected_tokens([i], 0, 4, 1000) for i in range(10)]
    assert client.num_retries == 0  # they waited in the batch


async def test_3000_prompts(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.max_queue = 100
    num_tokens = 0
    async for index, outcome in client.generate_batch([[1, i % 900] for i in range(3000)], max_tokens=4):
        assert not isinstance(outcome, SpecwireError), outcome
        assert outcome.token_ids[0] == index % 900 + 1
        num_tokens += len(outcome.token_ids)
    assert num_tokens == 12_000


# --- leaving early --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["break", "aclose", "async with", "exception", "task", "forgotten"])
async def test_leaving_a_batch_ends_what_runs(client: AsyncClient, engine: ScriptedEngine, way: str) -> None:
    params = [SamplingParams(max_tokens=4)] + [SamplingParams(max_tokens=None)] * 49
    engine.vocab_size = 1 << 30

    async def read() -> None:
        batch = client.generate_batch([[1]] * 50, params, max_concurrency=8)
        if way == "async with":
            async with batch:
                await anext(batch)
            return
        async for index, _ in batch:
            assert index == 0
            if way == "exception":
                raise ZeroDivisionError
            if way != "task":
                break
        if way == "aclose":
            await batch.aclose()
            await batch.aclose()
            assert await collect(batch) == {}

    reading = asyncio.create_task(read())
    if way == "task":
        await until(lambda: len(engine.requests) == 9)  # the first has ended, and the next one is waited for
        reading.cancel()
    with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
        await reading
    del reading
    gc.collect()
    await until(lambda: not engine.live)
    assert len(engine.requests) in (8, 9)
    assert sum(scripted.is_cancelled for scripted in engine.requests) == len(engine.requests) - 1
    assert client._attempts._connection is not None
    assert not client._attempts._connection.session._live


async def test_a_batch_that_is_never_read_sends_nothing(client: AsyncClient, engine: ScriptedEngine) -> None:
    batch = client.generate_batch([[1]])
    await batch.aclose()
    assert await collect(batch) == {}
    del batch
    assert engine.requests == []


async def test_closing_a_batch_ends_its_reader(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.is_paused = True
    batch = client.generate_batch([[1]] * 3)
    reading = asyncio.create_task(collect(batch))
    await until(lambda: len(engine.live) == 3)
    await batch.aclose()
    assert await reading == {}
    await until(lambda: not engine.live)


async def test_closing_the_client_ends_a_batch(client: AsyncClient, engine: ScriptedEngine) -> None:
    """What ran has the error; that nothing more can be sent is raised."""
    engine.is_paused = True
    batch = client.generate_batch([[1]] * 30, max_concurrency=2)
    first = asyncio.ensure_future(anext(batch))
    await until(lambda: len(engine.live) == 2)
    await client.close()
    assert isinstance((await first)[1], UnavailableError)
    with pytest.raises(FailedPreconditionError, match="the client is closed"):
        await anext(batch)


async def test_two_readers_of_one_batch(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.is_paused = True
    batch = client.generate_batch([[1, 1]] * 3, max_tokens=4)
    first = asyncio.ensure_future(anext(batch))
    await until(lambda: len(engine.live) == 3)
    with pytest.raises(FailedPreconditionError, match="another task reads this batch"):
        await anext(batch)
    engine.is_paused = False
    engine.wake()
    await first
    assert len(await collect(batch)) == 2
