"""The asynchronous client where something goes wrong: refusals, failures, slow readers, and servers that die and come back."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from specwire import AsyncClient
from specwire.client import StreamEvent
from specwire.errors import (
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnreachableError,
)
from specwire.messages import CanaryAction, ChoiceDelta, ErrorStatus, FinishReason
from specwire.rpc import Server, is_serving
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.coordinator.serving import serving
from tests.waiting import until


async def test_the_servers_refusal_is_a_typed_error(ids_client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match="token id 1000, but ids must be from 0 to 999"):
        await ids_client.generate([1000])
    with pytest.raises(InvalidArgumentError, match="token id -1"):
        await anext(ids_client.stream([-1]))
    with pytest.raises(InvalidArgumentError, match="the prompt is empty"):
        await ids_client.generate([])


async def test_wrong_arguments_are_refused_before_anything_is_sent(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    for wrong in ({"temprature": 1}, {"timeout": 0}, {"top_p": 2}):
        with pytest.raises(InvalidArgumentError):
            await ids_client.generate([1], **wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            ids_client.stream([1], **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="character 1"):
        ids_client.stream("a\ud800")
    assert ids_engine.requests == []


async def test_a_full_queue_is_a_typed_error(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    ids_engine.max_queue = 0
    with pytest.raises(ResourceExhaustedError, match="try again later"):
        await ids_client.generate([1])


async def test_a_request_over_the_limit_is_refused_and_disturbs_nobody(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    ids_engine.is_paused = True
    running = asyncio.create_task(ids_client.generate([5, 0], max_tokens=8))
    await until(lambda: len(ids_engine.live) == 1)
    with pytest.raises(ResourceExhaustedError, match=r"the request takes 20\d{5} bytes, but a message may have 1048512"):
        await ids_client.generate([1] * 500_000)
    ids_engine.is_paused = False
    ids_engine.wake()
    assert (await running).token_ids == list(range(1, 9))


async def test_starts_that_do_not_fit_one_message_take_several(ids_client: AsyncClient) -> None:
    results = await asyncio.gather(*(ids_client.generate([1] * 100_000 + [i], max_tokens=4) for i in range(10)))
    assert [result.token_ids for result in results] == [expected_tokens([i], 0, 4, 1000) for i in range(10)]


async def test_a_failed_request_raises_its_error_after_its_tokens(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    """A code that is not one of those after which a whole answer begins again."""
    ids_engine.is_paused = True
    stream = ids_client.stream([5, 0], max_tokens=100)
    first = asyncio.create_task(anext(stream))
    whole = asyncio.create_task(ids_client.generate([5, 0], max_tokens=100))
    await until(lambda: len(ids_engine.live) == 2)
    ids_engine.step()
    for scripted in list(ids_engine.live):
        scripted.fail(ErrorStatus(13, "a fault after 4 tokens"))
    assert (await first).token_ids == [1, 2, 3, 4]
    with pytest.raises(InternalError, match="after 4 tokens"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(InternalError, match="after 4 tokens"):
        await whole


async def test_a_failed_choice_is_an_error_only_if_all_failed(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    ids_engine.is_paused = True
    nan = ErrorStatus(13, "logits are not finite at position 7")

    async def fail(indices: set[int]) -> None:
        await until(lambda: len(ids_engine.live) == 1)
        scripted = ids_engine.live[0]
        for index in range(scripted.request.sampling.n):
            failed = index in indices
            scripted.sink.choice(
                ChoiceDelta(index, finish_reason=FinishReason.ERROR if failed else FinishReason.LENGTH, error=nan if failed else None)
            )
        ids_engine.live.clear()

    result, _ = await asyncio.gather(ids_client.generate([1], n=2), fail({1}))
    assert [choice.finish_reason for choice in result.choices] == ["length", "error"]
    assert isinstance(result.choices[1].error, InternalError)
    for n in (1, 2):
        whole = asyncio.create_task(ids_client.generate([1], n=n))
        await fail(set(range(n)))
        with pytest.raises(InternalError, match="position 7"):
            await whole
    stream = ids_client.stream([1])
    first = asyncio.create_task(anext(stream))
    await fail({0})
    event = await first
    assert (event.finish_reason, str(event.error)) == ("error", "logits are not finite at position 7")
    with pytest.raises(InternalError, match="position 7"):
        await anext(stream)


# --- many, slow, broken ---------------------------------------------------------------------------------------------


async def test_200_streams_on_one_session(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    async def read(i: int) -> list[int]:
        return [token_id async for event in ids_client.stream([1, i], max_tokens=40 + i % 17) for token_id in event.token_ids]

    found = await asyncio.gather(*map(read, range(200)))
    assert found == [expected_tokens([i], 0, 40 + i % 17, 1000) for i in range(200)]
    assert ids_engine.live == []


async def test_a_slow_consumer_finds_longer_events_and_holds_up_nobody(ids_client: AsyncClient, ids_engine: ScriptedEngine) -> None:
    slow = ids_client.stream([1, 0], max_tokens=600)
    first = await anext(slow)
    other = await ids_client.generate([1, 0], max_tokens=800)  # ends while nobody reads the slow one
    assert len(other.token_ids) == 800
    assert ids_client._attempts._connection is not None
    await until(lambda: not ids_client._attempts._connection.session._live)  # type: ignore[union-attr]
    rest: list[StreamEvent] = [event async for event in slow]
    assert [*first.token_ids, *(token_id for event in rest for token_id in event.token_ids)] == expected_tokens([0], 0, 600, 1000)
    assert len(rest) == 1
    assert rest[0].finish_reason == "length"


async def test_a_server_that_dies_fails_every_live_request(ids_engine: ScriptedEngine, socket_dir: Path) -> None:
    ids_engine.is_paused = True
    async with serving(ids_engine, socket_dir) as server, AsyncClient(server.bound_addresses[0], max_retries=0) as client:
        stream = client.stream([1, 0])
        first = asyncio.create_task(anext(stream))
        running = [asyncio.create_task(client.generate([1])) for _ in range(5)]
        await until(lambda: len(ids_engine.live) == 6)
        ids_engine.step()
        assert (await first).token_ids == [1, 2, 3, 4]
        await server._server._server.stop(None)
        for task in running:
            with pytest.raises(UnavailableError, match=r"connection to the coordinator at unix:.* broke"):
                await task
        with pytest.raises(UnavailableError, match="broke"):
            async for _ in stream:
                pass


async def test_a_coordinator_that_answers_is_there(ids_engine: ScriptedEngine, ids_client: AsyncClient) -> None:
    """It says itself what it waits for: no word of whether it runs."""
    ids_engine.set_ready(False, "no verifier")
    async with AsyncClient(ids_client._attempts.address, max_retries=0) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate("hi")
    assert not isinstance(caught.value, UnreachableError)
    text = f"the coordinator at {client._attempts.address} answered: the tokenizer is not known yet: no verifier; try again when health is SERVING"
    assert str(caught.value) == text


async def test_who_can_not_be_reached_is_named_by_every_call(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/nobody.sock"
    async with AsyncClient(address, max_retries=0) as client:
        for call in (client.generate([1]), client.get_status(), client.set_canary(CanaryAction.PROMOTE)):
            with pytest.raises(UnreachableError, match=rf"^the coordinator at {address} can't be reached \(.*\); is it running there\?$"):
                await call


async def test_another_server_is_no_coordinator_without_tokenizer(socket_dir: Path) -> None:
    server = Server([f"unix:{socket_dir}/other.sock"], [], lambda _: None)
    await server.start()
    async with AsyncClient(server.bound_addresses[0], max_retries=0) as client:
        with pytest.raises(UnavailableError, match="another server answers there, no coordinator"):
            await client.generate("hi")
    await server.stop(0)


async def test_the_client_goes_on_with_the_next_server(socket_dir: Path) -> None:
    client = AsyncClient(f"unix:{socket_dir}/coordinator.sock", max_retries=0)
    with pytest.raises(UnavailableError, match="can't be reached"):
        await client.generate([1, 0])
    for tokenizer in (None, make_spec()):
        engine = ScriptedEngine(tokenizer)
        async with serving(engine, socket_dir):
            await client.wait_ready(10)
            assert (await client.generate([1, 64], max_tokens=3)).token_ids == [65, 66, 67]
            if tokenizer is not None:  # asked again, since the first session broke
                assert (await client.generate("@", max_tokens=3)).text == "ABC"
            engine.is_paused = True
            running = asyncio.create_task(client.generate([1, 0]))
            await until(lambda engine=engine: len(engine.live) == 1)
        with pytest.raises(UnavailableError):
            await running
    await client.close()


async def test_wait_ready(ids_engine: ScriptedEngine, ids_client: AsyncClient) -> None:
    await ids_client.wait_ready(10)
    ids_engine.set_ready(False, "no verifier")
    assert ids_client._attempts._connection is not None
    async with asyncio.timeout(10):
        while await is_serving(ids_client._attempts._connection.channel):
            pass
    with pytest.raises(UnavailableError, match=r"does not serve after 0\.2 s"):
        await ids_client.wait_ready(0.2)
    waiting = asyncio.create_task(ids_client.wait_ready(10))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    ids_engine.set_ready(True)
    await waiting


async def test_wait_ready_without_a_server(socket_dir: Path) -> None:
    async with AsyncClient(f"unix:{socket_dir}/nobody.sock") as client:
        with pytest.raises(UnavailableError, match=r"nobody\.sock does not serve after 0\.2 s; is it running there"):
            await client.wait_ready(0.2)


async def test_little_is_on_its_way_to_a_client_that_falls_behind(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are not read ahead, so that the coordinator gathers what has not been read; the tokenizer, which is large, is."""
    opened: list[dict[str, Any]] = []
    open_one = grpc.aio.insecure_channel

    def watch(address: str, options: Any) -> grpc.aio.Channel:
        opened.append(dict(options))
        return open_one(address, options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", watch)
    assert (await client.generate("so @", max_tokens=6)).text == "ABCDEF"
    streams, tokenizer = opened
    assert streams["grpc.http2.bdp_probe"] == 0
    assert "grpc.http2.bdp_probe" not in tokenizer
    assert (await client.generate("so @", max_tokens=6)).text == "ABCDEF"
    assert len(opened) == 2
