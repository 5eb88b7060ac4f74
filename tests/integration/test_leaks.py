"""Real requests, most of them ended from outside at any moment: everything that they held is free again."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.draft_model import DraftModel
from specwire.client.aio import AsyncClient
from specwire.errors import DeadlineExceededError, UnavailableError
from specwire.sampling_params import SamplingParams
from tests.engine.tiny_models import save_tiny_model
from tests.waiting import until

from .noisy_model import save_noisy
from .reference import Expected, OneTokenLoop
from .tiny import TinyStack, drafter_config, tiny_stack, verifier_config

_NUM_CLIENTS = 24
_MAX_MODEL_LEN = 96
_MOST_AWAITS = 24
_Request = tuple[list[int], SamplingParams]


class CancelAt:
    """Awaits a coroutine whose task is cancelled at the n-th await, from 0, that suspends it. Later cancels do nothing."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], num_awaits: int) -> None:
        self._coroutine = coroutine
        self._num_awaits_left = num_awaits

    def __await__(self) -> Generator[Any, None, Any]:
        resume, argument = self._coroutine.send, None
        while True:
            try:
                future = resume(argument)
            except StopIteration as end:
                return end.value
            if self._num_awaits_left == 0:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # takes effect at the await that is about to suspend
            self._num_awaits_left -= 1
            resume, argument = self._coroutine.send, None
            try:
                yield future
            except BaseException as error:
                resume, argument = self._coroutine.throw, error


class Clients:
    """Sends requests and ends them in every way that a client has. What comes before the end is checked against the reference."""

    def __init__(self, stack: TinyStack, requests: list[tuple[_Request, Expected]], num_requests: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._stack = stack
        self._requests = requests
        self._random = random.Random(0)
        self._num_left = num_requests

    async def run(self) -> None:
        """One client: a request after the other, until all were sent."""
        ends = [self._wait, self._cancel_generate, self._cancel_stream, self._cancel_later, self._leave_stream, self._time_out, self._disconnect]
        while self._num_left:
            self._num_left -= 1
            end = self._random.choice(ends)
            (prompt, params), expected = self._random.choice(self._requests)
            try:
                await end(prompt, params, expected)
                outcome = "ended"
            except asyncio.CancelledError:
                outcome = "cancelled"
            except (DeadlineExceededError, UnavailableError) as error:
                outcome = type(error).__name__
            self.outcomes[f"{end.__name__.strip('_')}: {outcome}"] += 1

    async def _wait(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        result = await self._stack.client.generate(prompt, params)
        assert (result.token_ids, result.finish_reason) == (expected.token_ids, expected.finish_reason)

    async def _cancel_generate(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        await asyncio.create_task(_as_coroutine(CancelAt(self._wait(prompt, params, expected), self._random.randrange(4))))

    async def _cancel_stream(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        reading = self._read(self._stack.client, prompt, params, expected)
        await asyncio.create_task(_as_coroutine(CancelAt(reading, self._random.randrange(_MOST_AWAITS))))

    async def _cancel_later(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        task = asyncio.create_task(self._wait(prompt, params, expected))
        await asyncio.wait([task], timeout=self._random.uniform(0, 0.3))
        task.cancel()
        await task

    async def _leave_stream(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        await self._read(self._stack.client, prompt, params, expected, most=self._random.randrange(20))

    async def _time_out(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        await self._stack.client.generate(prompt, params, timeout=self._random.uniform(0.001, 0.2))

    async def _disconnect(self, prompt: list[int], params: SamplingParams, expected: Expected) -> None:
        """A client with a connection of its own, which goes away in the middle."""
        client = AsyncClient(self._stack.coordinator.address)
        task = asyncio.create_task(self._read(client, prompt, params, expected))
        await asyncio.wait([task], timeout=self._random.uniform(0, 0.3))
        await client.close()
        await task

    async def _read(self, client: AsyncClient, prompt: list[int], params: SamplingParams, expected: Expected, most: int = 1 << 30) -> None:
        """Reads a stream to its end, or until there are `most` tokens."""
        token_ids: list[int] = []
        async with client.stream(prompt, params) as stream:
            async for event in stream:
                token_ids += event.token_ids
                assert token_ids == expected.token_ids[: len(token_ids)]
                if len(token_ids) >= most:
                    return
        assert token_ids == expected.token_ids


async def _as_coroutine(awaitable: CancelAt) -> None:
    await awaitable


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and a draft model that is right now and then."""
    root = tmp_path_factory.mktemp("leaks")
    save_tiny_model(root / "target")
    save_noisy(root / "target", root / "draft", 0.1)
    return root / "target", root / "draft"


def make_requests(target: OneTokenLoop) -> list[tuple[_Request, Expected]]:
    """Short and long prompts, some with a beginning in common; greedy and sampled; with what they must give."""
    requests: list[_Request] = []
    for index in range(24):
        prompt = [32 + (index % 6 * 13 + 7 * position) % 90 for position in range(2 + index * 5 % 60)]
        requests.append((prompt, SamplingParams(max_tokens=1 + index * 7 % 24, temperature=index % 2 * 0.8, seed=index)))
    return [((prompt, params), target.generate(prompt, params)) for prompt, params in requests]


@pytest.mark.parametrize("num_requests", [200, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_all_blocks_and_slots_are_free_after_many_requests(socket_dir: Path, folders: tuple[Path, Path], num_requests: int) -> None:
    target, draft = folders
    requests = make_requests(OneTokenLoop(target, _MAX_MODEL_LEN, num_threads=1))
    # Fewer blocks than the running sequences need in the end, so that some are preempted.
    verifier = verifier_config(target, max_model_len=_MAX_MODEL_LEN, num_kv_blocks=10, max_num_seqs=8, max_num_batched_tokens=48)
    drafter = drafter_config(draft, max_num_seqs=6, prefill_chunk=32)
    async with tiny_stack(socket_dir, verifier, drafter, speculation={"num_speculative_tokens": 4}) as stack:
        engine, server = stack.coordinator.engine, stack.drafter
        assert server is not None
        [lane] = engine.lanes
        assert lane.num_free_blocks == stack.verifier.num_blocks == 10
        method = server.worker.ready.result()
        assert isinstance(method, DraftModel)
        num_draft_blocks = method.num_free_blocks

        clients = Clients(stack, requests, num_requests)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_CLIENTS):
                tasks.create_task(clients.run())

        await until(lambda: not lane.closes and not lane.in_flight and server.worker.pool.num_free == 6)
        engine.check_integrity()
        assert not lane.running
        assert stack.verifier.num_open_slots == 0
        # As the verifier's replies say, as its books say, and the drafter's.
        assert lane.num_free_blocks == stack.verifier.num_free_blocks == 10
        stack.verifier.check_integrity()
        assert method.num_free_blocks == num_draft_blocks
        method.check_integrity()
        # The run was what it is meant to be.
        counters = engine.counters
        assert sum(clients.outcomes.values()) == num_requests
        assert {outcome for outcome, count in clients.outcomes.items() if count >= 3} >= {
            "wait: ended", "cancel_generate: cancelled", "cancel_stream: cancelled", "cancel_stream: ended", "cancel_later: cancelled",
            "leave_stream: ended", "time_out: DeadlineExceededError", "disconnect: UnavailableError",
        }, clients.outcomes  # fmt: skip
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert counters.num_preemptions > 0
        assert counters.num_bad_rows == counters.num_garbage_drafts == counters.num_verifier_losses == 0
        # And everything still works.
        (prompt, params), expected = requests[-1]
        assert (await stack.client.generate(prompt, params)).token_ids == expected.token_ids
