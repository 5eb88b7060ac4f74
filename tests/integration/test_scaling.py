"""Replicas over real gRPC that come, stop, vanish and return while requests run."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire.client.aio import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.helpers import serve_drafter
from tests.engine.tiny_models import save_tiny_model
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until

from .reference import OneTokenLoop
from .stack import Service, coordinate, serve_verifier
from .tiny import drafter_config, verifier_config

_PROMPT = [72, 105, 32, 116, 104]
_SHARE = 0.6
_NUM_SEQS = 24
_BUSY_S = 5.0
"""What a busy machine may take on top."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaling") / "tiny"
    save_tiny_model(path)
    return path


class Hosts:
    """Names that stand for scripted services, each on an address of its own of this machine and all on one port."""

    def __init__(self, resources: AsyncExitStack) -> None:
        self.services: dict[str, list[ScriptedVerifier | ScriptedDrafter]] = {"verifier": [], "drafter": []}
        self.names: dict[str, list[str]] = {"verifier": [], "drafter": []}
        self._resources = resources
        with socket.create_server(("127.0.3.1", 0)) as taken:
            self.port = taken.getsockname()[1]

    async def resolve(self, host: str, port: int) -> list[str]:
        return list(self.names[host])

    async def add(self, kind: str) -> None:
        """One more replica, known at once."""
        number = len(self.services[kind]) + 1
        host = f"127.0.{1 if kind == 'verifier' else 2}.{number}"
        service: ScriptedVerifier | ScriptedDrafter
        if kind == "verifier":
            service = ScriptedVerifier(byte_verifier_script(max_model_len=4096, max_num_seqs=32, num_blocks=30_000, delay_s=0.01))
        else:
            service = ScriptedDrafter(byte_drafter_script(max_model_len=4096, delay_s=0.002))
        server = ScriptedService(service, f"{host}:{self.port}")
        await server.start()
        self._resources.push_async_callback(server.kill)
        self.services[kind].append(service)
        self.names[kind].append(host)

    def num_rows(self, kind: str) -> list[int]:
        return [service.num_rows for service in self.services[kind]]

    async def shares(self, kind: str) -> list[float]:
        """What each replica does of the work of a while, 1.0 being its fair share."""
        before = self.num_rows(kind)
        await until(lambda: sum(self.num_rows(kind)) - sum(before) > 50 * _NUM_SEQS, 60.0)
        done = [after - start for start, after in zip(before, self.num_rows(kind), strict=True)]
        return [part * len(done) / sum(done) for part in done]


async def test_new_replicas_get_their_share_within_30_seconds(socket_dir: Path) -> None:
    """One verifier and one drafter become three and four, with the intervals that users have."""
    async with AsyncExitStack() as resources:
        hosts = Hosts(resources)
        await hosts.add("verifier")
        await hosts.add("drafter")
        config = CoordinatorConfig(
            listen=(f"unix:{socket_dir}/c",), verifiers=(f"verifier:{hosts.port}",), drafters=(f"drafter:{hosts.port}",), min_draft_wait_ms=1000.0,
            speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        )  # fmt: skip
        engine = Engine(config, resolve=hosts.resolve)
        client = await resources.enter_async_context(_served(engine, config))
        running = [asyncio.create_task(_generate(client, hosts, seed)) for seed in range(_NUM_SEQS)]
        await until(lambda: bool(engine.lanes) and len(engine.lanes[0].running) == _NUM_SEQS, 60.0)
        started = time.monotonic()
        await hosts.add("verifier")
        await hosts.add("verifier")
        for _ in range(3):
            await hosts.add("drafter")
        shares = [0.0]
        while min(shares) < _SHARE:
            shares = await hosts.shares("verifier") + await hosts.shares("drafter")
        assert len(shares) == 7
        took_s = time.monotonic() - started
        assert took_s < 30, f"{took_s:.1f} s until every replica had its share"
        assert engine.counters.num_verifier_losses == engine.counters.num_drafter_losses == 0
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: all(not lane.running for lane in engine.lanes))
        engine.check_integrity()


@asynccontextmanager
async def _served(engine: Engine, config: CoordinatorConfig) -> AsyncIterator[AsyncClient]:
    server = CoordinatorServer(engine, config)
    await server.start()
    following = None
    try:
        await engine.start()
        following = asyncio.create_task(server.follow_readiness())
        async with AsyncClient(config.listen[0]) as client:
            await client.wait_ready()
            yield client
    finally:
        await asyncio.gather(engine.stop(0.5), server.stop(1.0))
        if following is not None:
            following.cancel()


async def _generate(client: AsyncClient, hosts: Hosts, seed: int) -> None:
    """One answer after the other, each compared with what the target alone gives."""
    rng = random.Random(seed)
    while True:
        params = SamplingParams(seed=rng.getrandbits(32), max_tokens=rng.randint(200, 2000))
        result = await client.generate(_PROMPT, params)
        assert result.token_ids == hosts.services["verifier"][0].target.generate(_PROMPT, len(result.token_ids), params.seed or 0)
        assert len(result.token_ids) == params.max_tokens


async def test_a_verifier_that_is_asked_to_end_hands_over(socket_dir: Path, folder: Path) -> None:
    """SIGTERM under load: status 0, long before the grace is over; no token is lost."""
    verifiers = [Service(verifier_config(folder, listen=(f"unix:{socket_dir}/v{index}",), grace_s=60.0)) for index in range(2)]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=200, ignore_eos=True) for seed in range(4)]
    reference = OneTokenLoop(folder, 256, num_threads=1)
    try:
        for verifier in verifiers:
            verifier.start()
        expected = [reference.generate(_PROMPT, param).token_ids for param in params]
        for verifier in verifiers:
            await asyncio.to_thread(verifier.wait_ready)
        async with coordinate(socket_dir, [verifier.address for verifier in verifiers]) as stack:
            first, second = stack.engine.lanes
            await until(lambda: first.is_ready and second.is_ready)
            running = [asyncio.create_task(stack.client.generate(_PROMPT, param)) for param in params]
            await until(lambda: bool(first.running) and all(len(sequence.token_ids) > len(_PROMPT) for sequence in first.running))
            assert await asyncio.to_thread(verifiers[0].stop) == 0
            assert [result.token_ids for result in await asyncio.gather(*running)] == expected
            counters = stack.engine.counters
            assert (counters.num_handovers, counters.num_verifier_losses, counters.num_dropped_rows) == (2, 0, 0)
    finally:
        for verifier in verifiers:
            if verifier.is_running:
                verifier.kill()


async def test_drafters_are_swapped_under_load(socket_dir: Path, folder: Path) -> None:
    """A prompt lookup and a draft model at once, then each in the other's place: the text is the target's."""
    params = [SamplingParams(temperature=0.7 * (seed % 2), seed=seed, max_tokens=230, ignore_eos=True) for seed in range(4)]
    reference = OneTokenLoop(folder, 256, num_threads=1)
    expected = [reference.generate(_PROMPT, param).token_ids for param in params]
    configs = [DrafterConfig(), drafter_config(folder)]
    async with AsyncExitStack() as resources:
        loaded, address = await resources.enter_async_context(serve_verifier(socket_dir, verifier_config(folder)))
        drafters = [await resources.enter_async_context(_swappable(socket_dir, f"d{index}", config)) for index, config in enumerate(configs)]
        addresses = [f"unix:{socket_dir}/d{index}" for index in range(2)]
        stack = await resources.enter_async_context(coordinate(socket_dir, [address], addresses, speculation={"num_speculative_tokens": 4}))
        all_swapped = asyncio.Event()

        async def answer_until_swapped(param: SamplingParams, token_ids: list[int]) -> None:
            while True:
                was_last = all_swapped.is_set()
                assert (await stack.client.generate(_PROMPT, param)).token_ids == token_ids
                if was_last:
                    return

        running = [asyncio.create_task(answer_until_swapped(*case)) for case in zip(params, expected, strict=True)]
        counters = stack.engine.counters
        for index, swap in enumerate(drafters):
            num_drafts = counters.num_draft_tokens
            await until(lambda num_drafts=num_drafts: counters.num_draft_tokens > num_drafts)  # type: ignore[misc]
            await swap(configs[1 - index])
        all_swapped.set()
        await asyncio.gather(*running)
        assert counters.num_drafter_handovers > 0
        assert counters.num_drafter_losses == counters.num_garbage_drafts == counters.num_bad_rows == 0
        assert 0 < counters.num_accepted_tokens <= counters.num_draft_tokens
        await until(lambda: loaded.verifier.num_open_slots == 0)


@asynccontextmanager
async def _swappable(socket_dir: Path, name: str, config: DrafterConfig) -> AsyncIterator[Callable[[DrafterConfig], Awaitable[None]]]:
    """A drafter, and what replaces it by another one at its address."""
    current = AsyncExitStack()
    server = await current.enter_async_context(serve_drafter(socket_dir, config, name=name))

    async def swap(other: DrafterConfig) -> None:
        nonlocal server
        await server.drain(30.0)
        await current.aclose()
        server = await current.enter_async_context(serve_drafter(socket_dir, other, name=name))

    async with current:
        yield swap


class Cable:
    """A proxy that can fall silent: nothing passes any more, but no connection is closed, as if a host had vanished."""

    def __init__(self) -> None:
        self.is_cut = False
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def lay(self, socket_path: Path) -> AsyncIterator[str]:
        """The address that leads to a Unix socket."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_unix_connection(str(socket_path))
            self._writers += [writer, far_writer]
            self._tasks += [asyncio.create_task(self._pump(reader, far_writer)), asyncio.create_task(self._pump(far_reader, writer))]

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.is_cut:
                    writer.write(data)
                    await writer.drain()
        if not self.is_cut:
            writer.close()


async def test_a_host_that_vanished_is_noticed(socket_dir: Path, folder: Path) -> None:
    """Unanswered pings tell: the verifier after 4.5 s, so that it is free for another coordinator, and the coordinator after 8 s."""
    cable = Cable()
    async with serve_verifier(socket_dir, verifier_config(folder)) as (loaded, address), cable.lay(socket_dir / "verifier") as far_address:
        config = CoordinatorConfig(listen=(f"unix:{socket_dir}/c",), verifiers=(far_address,))
        engine = Engine(config)
        async with _served(engine, config) as client:
            running = asyncio.create_task(client.generate(_PROMPT, max_tokens=200, ignore_eos=True))
            await until(lambda: loaded.verifier.num_open_slots == 1)
            cable.is_cut = True
            started = time.monotonic()
            await until(lambda: loaded.verifier.num_open_slots == 0, 20.0)
            verifier_s = time.monotonic() - started
            await until(lambda: not engine.lanes[0].is_ready, 20.0)
            coordinator_s = time.monotonic() - started
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        async with coordinate(socket_dir, [address], coordinator_id="another") as stack:
            assert len((await stack.client.generate(_PROMPT, max_tokens=5, ignore_eos=True)).token_ids) == 5
    assert verifier_s < 4.5 + _BUSY_S, verifier_s
    assert coordinator_s < 8.0 + _BUSY_S, coordinator_s
