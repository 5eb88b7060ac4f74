"""Streams that never end, each answer compared with an undisturbed one: what a client sees of what happens to a stack."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from specwire.client import AsyncClient
from specwire.errors import SpecwireError, UnavailableError
from specwire.sampling_params import SamplingParams

_PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2,",
    "Once upon a time there was a fox who",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "A list of fruit: apple, banana, cherry,",
)


@dataclass(slots=True)
class Phase:
    """What clients saw while something was done to the stack.

    Args:
        different: answers whose tokens are not those of the undisturbed run.
        unavailable: what requests said that ended with UNAVAILABLE; errors: those that ended with anything else.
        longest_gap_s: between two events of one stream, its start included.
    """

    answers: int = 0
    tokens: int = 0
    different: int = 0
    unavailable: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "different": self.different,
            "unavailable": self.unavailable,
            "errors": self.errors,
            "longest_gap_s": round(self.longest_gap_s, 2),
        }


class Load:
    """num_streams requests at any time, from `start` to `stop`."""

    def __init__(self, client: AsyncClient, num_streams: int, max_tokens: int) -> None:
        self._client = client
        self.num_streams = num_streams
        self._cases = [
            (prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True))
            for seed, (prompt, temperature) in enumerate(itertools.product(_PROMPTS, (0.0, 0.8)))
        ]
        self._expected: list[list[int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._silent: set[int] = set()
        self._all_heard = asyncio.Event()
        self.phase = Phase()

    async def learn(self) -> int:
        """Takes the answers of an undisturbed run as the expected ones; returns how many tokens they have."""
        results = await asyncio.gather(*(self._client.generate(prompt, params) for prompt, params in self._cases))
        self._expected = [result.token_ids for result in results]
        return sum(map(len, self._expected))

    def start(self) -> None:
        """Begins all streams."""
        assert self._expected, "start() comes after learn()"
        self._tasks = [asyncio.create_task(self._work(index)) for index in range(self.num_streams)]

    def next_phase(self) -> Phase:
        """Counts from here on anew; returns what was counted."""
        ended, self.phase = self.phase, Phase()
        return ended

    async def hear_all(self) -> None:
        """Returns once every stream has had an event from here on."""
        self._silent = set(range(self.num_streams))
        self._all_heard.clear()
        await self._all_heard.wait()

    async def stop(self) -> Phase:
        """Lets the running requests end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        return self.next_phase()

    async def cancel(self) -> None:
        """Ends what `stop` did not."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, index: int) -> None:
        for case in itertools.islice(itertools.cycle(range(len(self._cases))), index, None):
            if self._stopping:
                return
            try:
                await self._ask(index, case)
            except UnavailableError as error:
                self.phase.unavailable.append(str(error))
                await self._client.wait_ready(300.0)
            except SpecwireError as error:
                self.phase.errors.append(f"{type(error).__name__}: {error}")

    async def _ask(self, index: int, case: int) -> None:
        prompt, params = self._cases[case]
        token_ids: list[int] = []
        last_s = time.monotonic()
        async for event in self._client.stream(prompt, params):
            now_s = time.monotonic()
            self.phase.longest_gap_s = max(self.phase.longest_gap_s, now_s - last_s)
            last_s = now_s
            self._silent.discard(index)
            if not self._silent:
                self._all_heard.set()
            self.phase.tokens += len(event.token_ids)
            token_ids += event.token_ids
        self.phase.answers += 1
        self.phase.different += token_ids != self._expected[case]
