"""Streams of a drill: one answer after the other, with the time of every event, each compared with what the target alone gives."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specwire.client import AsyncClient
from specwire.errors import SpecwireError
from specwire.messages import TokenOrigin
from specwire.sampling_params import SamplingParams

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """A request and, once somebody asks, the tokens that it must give."""

    prompt: list[int]
    params: SamplingParams
    expected: Callable[[], list[int]]


@dataclass(slots=True)
class Answer:
    """What one request gave until it ended, failed (error: the kind of error) or was left."""

    case: Case
    token_ids: list[int] = field(default_factory=list)
    is_whole: bool = False
    error: str = ""
    error_text: str = ""

    @property
    def is_different(self) -> bool:
        """Whether its tokens, as far as it got, are others than they must be."""
        expected = self.case.expected()
        return self.token_ids != (expected if self.is_whole else expected[: len(self.token_ids)])


class Load:
    """num_streams requests at any time, from `start` to `stop`.

    Args:
        make_case: the request number n, from 0, of a stream.

    Attributes:
        gaps: (start, end) in time.monotonic() of the pause before each event of a stream, but for the first one of an answer.
        num_accepted: draft tokens among what came.
        num_tokens: of each stream.
        error_s: when each failed request failed.
    """

    def __init__(self, client: AsyncClient, make_case: Callable[[int, int], Case], num_streams: int) -> None:
        self.client = client
        self.num_streams = num_streams
        self.answers: list[Answer] = []
        self.gaps: list[tuple[float, float]] = []
        self.error_s: list[float] = []
        self.num_accepted = 0
        self.num_tokens = [0] * num_streams
        self._make_case = make_case
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    def start(self) -> None:
        """Begins all streams."""
        self._tasks = [asyncio.create_task(self._work(index)) for index in range(self.num_streams)]

    async def stop(self) -> None:
        """Leaves all streams. Raises what one of them failed with, if it is no error of a request."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def more_accepted(self, num_tokens: int = 8) -> None:
        """Returns once so many more draft tokens have come."""
        goal = self.num_accepted + num_tokens
        await self._until(lambda: self.num_accepted >= goal, f"{num_tokens} accepted draft tokens")

    async def more_tokens(self, num_tokens: int) -> None:
        """Returns once every stream has so many tokens more."""
        goals = [count + num_tokens for count in self.num_tokens]
        await self._until(lambda: all(count >= goal for count, goal in zip(self.num_tokens, goals, strict=True)), f"{num_tokens} tokens a stream")

    def longest_gap_s(self, from_s: float, to_s: float) -> float:
        """Of the gaps that reach into an interval."""
        return max((end - start for start, end in self.gaps if end > from_s and start < to_s), default=0.0)

    def find_problems(self, allowed_error: str = "") -> list[str]:
        """A sentence for each answer that is not as it must be."""
        problems = []
        for number, answer in enumerate(self.answers):
            if answer.error and answer.error != allowed_error:
                problems.append(f"request {number} failed with {answer.error}: {answer.error_text}")
            if answer.is_different:
                problems.append(f"request {number} has other tokens than the target alone gives, within {len(answer.token_ids)}")
        return problems

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return {
            "requests": len(self.answers),
            "whole_answers": sum(answer.is_whole for answer in self.answers),
            "tokens_compared": sum(len(answer.token_ids) for answer in self.answers),
            "different_answers": sum(answer.is_different for answer in self.answers),
            "client_errors": sum(bool(answer.error) for answer in self.answers),
            "accepted_draft_tokens": self.num_accepted,
        }

    async def _work(self, index: int) -> None:
        for number in itertools.count():
            answer = Answer(self._make_case(index, number))
            self.answers.append(answer)
            try:
                await self._read(index, answer)
            except SpecwireError as error:
                self.error_s.append(time.monotonic())
                answer.error, answer.error_text = type(error).__name__, str(error)
                self._news.set()
                await self.client.wait_ready(_TIMEOUT_S)

    async def _read(self, index: int, answer: Answer) -> None:
        last_s = 0.0
        async with self.client.stream(answer.case.prompt, answer.case.params) as stream:
            async for event in stream:
                now_s = time.monotonic()
                if last_s:
                    self.gaps.append((last_s, now_s))
                last_s = now_s
                answer.token_ids += event.token_ids
                answer.is_whole = event.finish_reason is not None
                self.num_tokens[index] += len(event.token_ids)
                self.num_accepted += event.origins.count(TokenOrigin.ACCEPTED)
                self._news.set()

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not holds():
                    self._news.clear()
                    news = asyncio.create_task(self._news.wait())
                    done, _ = await asyncio.wait([news, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
                    news.cancel()
                    for task in done - {news}:
                        task.result()  # raises what ended a stream for good
        except TimeoutError:
            raise TimeoutError(f"waited {_TIMEOUT_S:g} s for {what}; so far: {self.num_tokens}, {self.num_accepted} accepted") from None
