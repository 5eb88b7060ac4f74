"""Batches: every prompt's own result or error, as they end; neither more on the way than may be, nor anything left of a batch that was left."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire import AsyncBatch, AsyncClient, BatchItem, Chat, SamplingParams
from specwire.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SpecwireError,
    UnavailableError,
)
from specwire.messages import ErrorStatus
from tests.coordinator.byte_tokenizer import ids_of, make_spec
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.coordinator.serving import serving
from tests.waiting import until


@pytest.fixture
async def engine() -> ScriptedEngine:
    """Counts up in bytes, and never ends by itself."""
    engine = ScriptedEngine(make_spec())
    engine.eos_token_ids, engine.vocab_size = (), 1000
    engine.retry_after_ms = 5
    return engine


@pytest.fixture
async def client(engine: ScriptedEngine, socket_dir: Path) -> AsyncIterator[AsyncClient]:
    async with serving(engine, socket_dir) as server, AsyncClient(server.bound_addresses[0], max_message_mb=1) as client:
        yield client


def watch_live(engine: ScriptedEngine) -> list[int]:
    """Grows by the number of running requests at each step."""
    counts: list[int] = []
    engine.on_step = lambda: counts.append(len(engine.live))
    return counts


async def collect(batch: AsyncBatch) -> dict[int, Any]:
    outcomes: dict[int, Any] = {}
    async for index, outcome in batch:
        assert index not in outcomes
        outcomes[index] = outcome
    return outcomes


# --- results --------------------------------------------------------------------------------------------------------


async def test_results_come_as_they_end(client: AsyncClient, engine: ScriptedEngine) -> None:
    async def run_once_all_are_there() -> None:
        await until(lambda: len(engine.live) == 4)
        engine.is_paused = False
        engine.wake()

    lengths, order = [800, 4, 400, 100], []
    engine.is_paused = True
    starting = asyncio.create_task(run_once_all_are_there())
    async for index, outcome in client.generate_batch([[1, i] for i in range(4)], [SamplingParams(max_tokens=length) for length in lengths]):
        assert not isinstance(outcome, SpecwireError)
        assert outcome.token_ids == expected_tokens([index], 0, lengths[index], 1000)
        order.append(index)
    await starting
    assert order == [1, 3, 2, 0]


async def test_text_ids_and_conversations(client: AsyncClient, engine: ScriptedEngine) -> None:
    outcomes = await collect(client.generate_batch(iter(["so @", ids_of("A")]), SamplingParams(n=2), max_tokens=3, request_id="label"))
    assert [[choice.text for choice in outcomes[index].choices] for index in range(2)] == [["ABC", "BCD"], ["BCD", "CDE"]]
    assert sorted(scripted.request.request_id for scripted in engine.requests) == ["label-0", "label-1"]


async def test_prompts_are_taken_as_they_can_be_sent(client: AsyncClient, engine: ScriptedEngine) -> None:
    """From an iterable and from an asynchronous one, which may keep the next one waiting while the others end."""
    num_taken, gate = 0, asyncio.Event()

    def endless() -> Iterator[list[int]]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield [num_taken]

    async with client.generate_batch(endless(), max_tokens=1, max_concurrency=3) as batch:
        for _ in range(20):
            await anext(batch)
            assert num_taken <= 23

    async def gated() -> AsyncIterator[list[int]]:
        yield [7]
        await gate.wait()
        yield [8]

    outcomes = []
    async for index, outcome in client.generate_batch(gated(), max_tokens=1):
        outcomes.append((index, outcome.token_ids))  # type: ignore[union-attr]
        gate.set()
    assert outcomes == [(0, [8]), (1, [9])]


async def test_what_a_prompt_has_of_its_own(client: AsyncClient, engine: ScriptedEngine) -> None:
    items = [
        BatchItem([1], SamplingParams(max_tokens=5), request_id="mine"), BatchItem([2]), [3], BatchItem([4], timeout=-1.0),
        BatchItem([5], "seed"),  # type: ignore[arg-type]
    ]  # fmt: skip
    outcomes = await collect(client.generate_batch(items, SamplingParams(max_tokens=2), seed=7, request_id="all"))
    assert [len(outcomes[index].token_ids) for index in range(3)] == [5, 2, 2]
    assert all(isinstance(outcomes[index], InvalidArgumentError) for index in (3, 4))
    assert {scripted.request.sampling.seed for scripted in engine.requests} == {7}
    assert sorted(scripted.request.request_id for scripted in engine.requests) == ["all-1", "all-2", "mine"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_prompts_that_raise_end_the_batch(client: AsyncClient, engine: ScriptedEngine, is_async: bool) -> None:
    engine.is_paused = True

    def broken() -> Iterator[list[int]]:
        yield [1]
        raise ZeroDivisionError

    async def broken_later() -> AsyncIterator[list[int]]:
        yield [1]
        await until(lambda: len(engine.live) == 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await collect(client.generate_batch(broken_later() if is_async else broken()))
    await until(lambda: not engine.live)
    with pytest.raises(InvalidArgumentError, match="the prompts come one by one"):
        client.generate_batch(broken_later(), [SamplingParams()])


async def test_leaving_while_a_prompt_is_waited_for(client: AsyncClient, engine: ScriptedEngine) -> None:
    is_closed = asyncio.Event()

    async def never() -> AsyncIterator[list[int]]:
        try:
            yield [1]
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    async with client.generate_batch(never(), max_tokens=2) as batch:
        await anext(batch)
        reading = asyncio.ensure_future(anext(batch, None))
        await asyncio.sleep(0)
    assert await reading is None
    await is_closed.wait()


async def test_an_empty_batch(client: AsyncClient) -> None:
    assert await collect(client.generate_batch([])) == {}


async def test_one_bad_prompt_is_its_own_error(client: AsyncClient, engine: ScriptedEngine) -> None:
    prompts: list[Any] = ["@", "a\ud800", [100_000], [1.5], b"bytes", Chat([{"role": "user", "content": "@"}]), [1] * 400_000, "@"]
    outcomes = await collect(client.generate_batch(prompts, max_tokens=3))
    kinds = [InvalidArgumentError, InvalidArgumentError, InvalidArgumentError, InvalidArgumentError, FailedPreconditionError, ResourceExhaustedError]
    assert [type(outcomes[index]) for index in range(1, 7)] == kinds
    assert [outcomes[index].text for index in (0, 7)] == ["ABC", "ABC"]


async def test_a_failed_request_is_its_own_error(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.is_paused = True
    collecting = asyncio.create_task(collect(client.generate_batch([[1, i] for i in range(4)], max_tokens=3)))
    await until(lambda: len(engine.live) == 4)
    engine.live[1].fail(ErrorStatus(13, "not finite"))
    engine.is_paused = False
    engine.wake()
    outcomes = await collecting
    assert [isinstance(outcomes[index], InternalError) for index in range(4)] == [False, True, False, False]


async def test_the_timeout_is_each_prompts_own(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.is_paused = True
    outcomes = await collect(client.generate_batch([[1], [2]], timeout=0.05))
    assert all(isinstance(outcome, DeadlineExceededError) for outcome in outcomes.values())
    await until(lambda: not engine.live)


async def test_wrong_arguments_are_refused_at_once(client: AsyncClient, engine: ScriptedEngine) -> None:
    for wrong in ({"temprature": 1}, {"timeout": 0}, {"max_concurrency": 0}, {"params": [SamplingParams()]}, {"top_p": 2}):
        with pytest.raises(InvalidArgumentError):
            client.generate_batch([[1], [2]], **wrong)  # type: ignore[arg-type]
    assert engine.requests == []


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
