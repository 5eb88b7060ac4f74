"""Processes that end while requests run: the text goes on where it can, and what was held is free."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from specwire.client.aio import AsyncClient
from specwire.client.results import StreamEvent
from specwire.client.stream import AsyncTokenStream
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.errors import UnavailableError
from specwire.rpc import is_serving, open_channel
from specwire.sampling_params import SamplingParams
from tests.drafter.helpers import serve_drafter
from tests.engine.tiny_models import save_tiny_model
from tests.waiting import until

from .reference import OneTokenLoop
from .stack import Service, coordinate, serve_verifier
from .tiny import verifier_config

_PROMPT = [72, 105, 32, 116, 104]
_PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=240, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("losses") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return OneTokenLoop(folder, 256, num_threads=1).generate(_PROMPT, _PARAMS).token_ids


@pytest.fixture
def coordinator(socket_dir: Path) -> Iterator[Service]:
    """A coordinator process for a verifier at `verifier` in the folder for sockets; not started."""
    service = Service(CoordinatorConfig(listen=(f"unix:{socket_dir}/coordinator",), verifiers=(f"unix:{socket_dir}/verifier",)))
    yield service
    if service.is_running:
        service.kill()


async def read_on(stream: AsyncTokenStream, token_ids: list[int]) -> None:
    """Adds what comes."""
    async for event in stream:
        token_ids += event.token_ids


async def test_the_only_verifier_is_killed_and_comes_back(socket_dir: Path, folder: Path, expected: list[int]) -> None:
    verifier = Service(verifier_config(folder, listen=(f"unix:{socket_dir}/verifier",)))
    verifier.start()
    try:
        await asyncio.to_thread(verifier.wait_ready)
        async with coordinate(socket_dir, [verifier.address]) as stack:
            stream = stack.client.stream(_PROMPT, _PARAMS)
            events = [await anext(stream)]
            verifier.kill()
            assert len(events[0].token_ids) < len(expected)
            verifier.start()
            events += [event async for event in stream]
            assert stack.engine.counters.num_verifier_losses == 1
        assert [token_id for event in events for token_id in event.token_ids] == expected
        assert events[-1].finish_reason == "length"
    finally:
        verifier.kill()


async def test_the_only_verifier_comes_back_with_another_model(socket_dir: Path, tmp_path: Path, folder: Path, expected: list[int]) -> None:
    """Coordinator and client need no restart, and a drafter that drafts for both goes on."""
    other = tmp_path / "other"
    save_tiny_model(other, seed=1)
    address = f"unix:{socket_dir}/verifier"
    others = OneTokenLoop(other, 256, num_threads=1).generate(_PROMPT, _PARAMS).token_ids
    async with serve_drafter(socket_dir, DrafterConfig(skip_tokenizer=True)) as drafter, AsyncExitStack() as resources:
        async with serve_verifier(socket_dir, verifier_config(folder)):
            stack = await resources.enter_async_context(coordinate(socket_dir, [address], [drafter.addresses[0]]))
            assert (await stack.client.generate(_PROMPT, _PARAMS)).token_ids == expected
        await until(lambda: not stack.engine.ready.is_ready)
        async with serve_verifier(socket_dir, verifier_config(other)):
            await stack.client.wait_ready()
            result = await stack.client.generate(_PROMPT, _PARAMS)
            assert (result.token_ids, (await stack.client.get_status()).model_id) == (others, "other")
            assert expected != others, "the models differ"
            assert all(link.is_connected for link in stack.engine.lanes[0].links)
            assert stack.engine.counters.num_drafter_losses == 0


async def test_a_coordinator_that_is_killed_leaves_nothing_open(socket_dir: Path, folder: Path, coordinator: Service, expected: list[int]) -> None:
    async with serve_verifier(socket_dir, verifier_config(folder)) as (loaded, _):
        coordinator.start()
        await asyncio.to_thread(coordinator.wait_ready)
        async with AsyncClient(coordinator.address) as client:
            stream = client.stream(_PROMPT, _PARAMS)
            token_ids = (await anext(stream)).token_ids
            coordinator.kill()
            with pytest.raises(UnavailableError):
                await read_on(stream, token_ids)
            assert token_ids == expected[: len(token_ids)]
            await until(lambda: loaded.verifier.num_open_slots == 0, 60.0)
            assert loaded.verifier.num_free_blocks == loaded.verifier.num_blocks
            # The client reconnects by itself, and the verifier lets the new process in.
            coordinator.start()
            await asyncio.to_thread(coordinator.wait_ready)
            assert (await client.generate(_PROMPT, _PARAMS)).token_ids == expected


async def test_a_coordinator_that_is_asked_to_end_finishes_what_runs(
    socket_dir: Path, folder: Path, coordinator: Service, expected: list[int]
) -> None:
    async with serve_verifier(socket_dir, verifier_config(folder)):
        coordinator.start()
        await asyncio.to_thread(coordinator.wait_ready)
        async with AsyncClient(coordinator.address) as client, open_channel(coordinator.address) as channel:
            stream = client.stream(_PROMPT, _PARAMS)
            events: list[StreamEvent] = [await anext(stream)]
            stopping = asyncio.create_task(asyncio.to_thread(coordinator.stop))
            events += [event async for event in stream]
            assert [token_id for event in events for token_id in event.token_ids] == expected
            assert not await is_serving(channel)
            assert await stopping == 0
