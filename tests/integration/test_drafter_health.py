"""A drafter with the target's own weights, greedy: every draft is accepted, whatever happened to the drafter before."""

import asyncio
from pathlib import Path

import pytest

from specwire.client.results import StreamEvent
from specwire.client.stream import AsyncTokenStream
from specwire.messages import SpecStats, TokenOrigin
from specwire.sampling_params import SamplingParams

from .matrix import Case, load_cases
from .reference import Expected, OneTokenLoop
from .stack import Fleet, Stack, coordinate

_NUM_TOKENS = 72
_K = 4


@pytest.fixture(scope="module")
def case(target: OneTokenLoop) -> Case:
    """A prompt whose answer is long enough."""
    return load_cases(target.tokenizer, num_prompts=12, samplings=("greedy",), max_tokens=_NUM_TOKENS)[0]


@pytest.fixture(scope="module")
def expected(target: OneTokenLoop, case: Case) -> Expected:
    answer = target.generate(case.prompt_token_ids, case.params)
    assert answer.finish_reason == "length"
    return answer


class Reader:
    """Reads a stream in parts."""

    def __init__(self, stream: AsyncTokenStream) -> None:
        self.token_ids: list[int] = []
        self.origins: list[TokenOrigin] = []
        self.last: StreamEvent | None = None
        self._stream = stream

    async def read(self, num_tokens: int) -> None:
        """Until so many more tokens have come."""
        end = len(self.token_ids) + num_tokens
        while len(self.token_ids) < end:
            self._take(await anext(self._stream))

    async def read_until_accepted(self) -> None:
        """Until the next accepted draft."""
        start = len(self.origins)
        while TokenOrigin.ACCEPTED not in self.origins[start:]:
            self._take(await anext(self._stream))

    async def finish(self) -> SpecStats:
        """The rest; statistics of all."""
        async for event in self._stream:
            self._take(event)
        assert self.last is not None
        assert self.last.spec is not None
        return self.last.spec

    def _take(self, event: StreamEvent) -> None:
        self.token_ids += event.token_ids
        self.origins += event.origins
        self.last = event


def read(stack: Stack, case: Case) -> Reader:
    return Reader(stack.client.stream(case.prompt_token_ids, case.params))


def check_full_acceptance(spec: SpecStats) -> None:
    assert spec.num_draft_tokens > 0
    assert spec.num_accepted_tokens == spec.num_draft_tokens


@pytest.mark.parametrize("k", [1, 8, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 4))])
async def test_all_drafts_are_accepted(fleet: Fleet, socket_dir: Path, case: Case, expected: Expected, k: int) -> None:
    verifier, drafter = fleet.get("verifier", "same")
    async with coordinate(socket_dir, [verifier.address], [drafter.address], speculation={"num_speculative_tokens": k}) as stack:
        result = await stack.client.generate(case.prompt_token_ids, case.params.replace(max_tokens=20))
    assert result.token_ids == expected.token_ids[:20]
    check_full_acceptance(result.spec)
    # One token from the prefill; at most some steps more while the drafter computes the prompt; the others give K + 1.
    assert result.spec.num_steps <= 19 / (k + 1) + 6
    assert result.spec.accepted_per_position[:k] == tuple(sorted(result.spec.accepted_per_position[:k], reverse=True))


async def test_all_drafts_are_accepted_after_steps_at_k_zero(fleet: Fleet, socket_dir: Path, case: Case, expected: Expected) -> None:
    verifier, drafter = fleet.get("verifier", "same")
    speculation = {"num_speculative_tokens": _K, "num_speculative_tokens_per_batch_size": [[1, 1, _K], [2, 64, 0]]}
    async with coordinate(socket_dir, [verifier.address], [drafter.address], speculation=speculation) as stack:
        reader = read(stack, case)
        await reader.read_until_accepted()
        # A second sequence sets K to 0 as long as it runs.
        other = await stack.client.generate(case.prompt_token_ids[::-1], SamplingParams(max_tokens=24, ignore_eos=True))
        assert other.spec.num_draft_tokens == 0
        num_before = len(reader.token_ids)
        spec = await reader.finish()
    assert reader.token_ids == expected.token_ids
    check_full_acceptance(spec)
    origins = "".join("P" if origin is TokenOrigin.PLAIN else "d" for origin in reader.origins)
    assert "P" * 20 in origins[num_before:], origins
    assert "d" in origins[origins.rindex("P" * 20) + 20 :], origins


async def test_all_drafts_are_accepted_after_a_restart(fleet: Fleet, socket_dir: Path, case: Case, expected: Expected) -> None:
    verifier, drafter = fleet.get("verifier", "same")
    async with coordinate(socket_dir, [verifier.address], [drafter.address], speculation={"num_speculative_tokens": _K}) as stack:
        [lane] = stack.engine.lanes
        reader = read(stack, case)
        await reader.read_until_accepted()
        drafter.kill()
        await reader.read(4)
        assert stack.engine.counters.num_drafter_losses == 1
        verifier.pause()  # so that the text does not end while the drafter loads
        try:
            fleet.get("same")
            while not lane.links[0].is_usable:
                await lane.something_new()
        finally:
            verifier.resume()
        await reader.read_until_accepted()
        spec = await reader.finish()
    assert reader.token_ids == expected.token_ids
    check_full_acceptance(spec)


async def test_all_drafts_are_accepted_after_timeouts(fleet: Fleet, socket_dir: Path, case: Case, expected: Expected) -> None:
    verifier, drafter = fleet.get("verifier", "same")
    speculation = {"num_speculative_tokens": _K}
    async with coordinate(socket_dir, [verifier.address], [drafter.address], speculation=speculation, min_draft_wait_ms=500.0) as stack:
        counters = stack.engine.counters
        reader = read(stack, case)
        await reader.read_until_accepted()
        for num_timeouts in (1, 2):
            drafter.pause()
            try:
                await reader.read(6)
            finally:
                drafter.resume()
            assert counters.num_drafter_timeouts >= num_timeouts
            await reader.read_until_accepted()
        spec = await reader.finish()
        assert counters.num_drafter_losses == 0
    assert reader.token_ids == expected.token_ids
    check_full_acceptance(spec)
    assert stack.engine.counters.fallbacks["drafter_timeout"] >= 2


async def test_two_requests_at_once_are_accepted_too(fleet: Fleet, socket_dir: Path, case: Case, expected: Expected) -> None:
    """Noise is the request's own: sampled drafts of the same weights are accepted as well, next to greedy ones."""
    verifier, drafter = fleet.get("verifier", "same")
    sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True)
    async with coordinate(socket_dir, [verifier.address], [drafter.address], speculation={"num_speculative_tokens": _K}) as stack:
        results = await asyncio.gather(
            stack.client.generate(case.prompt_token_ids, case.params.replace(max_tokens=16)), stack.client.generate(case.prompt_token_ids, sampled)
        )
    assert results[0].token_ids == expected.token_ids[:16]
    for result in results:
        check_full_acceptance(result.spec)
