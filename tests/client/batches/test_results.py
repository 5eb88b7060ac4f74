"""Batches: every prompt's own result or error, as they end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from specwire import AsyncClient, BatchItem, Chat, SamplingParams
from specwire.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SpecwireError,
)
from specwire.messages import ErrorStatus
from tests.client.batches.collect import collect
from tests.coordinator.byte_tokenizer import ids_of
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.waiting import until


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
