"""Clients of benchmarks.http_load: each sends one streaming request after the other, and every answer is compared with the target's own."""

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from specwire.bench.http_client import HttpClient
from specwire.client import AsyncClient
from specwire.errors import SpecwireError
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from tests.scripted.scripts import LETTERS
from tests.scripted.target import Target

PROMPT_LEN = 48
MAX_TOKENS = 384
_MIN_TOKENS = 128
_NUM_CASES = 128
_MAX_EXAMPLES = 5


@dataclass(slots=True)
class Tally:
    """What clients saw; problems: the first few of what was not as it should be.

    Args:
        events: server-sent events with text.
        ttfts_s: from sending to the first event of each answer.
    """

    answers: int = 0
    tokens: int = 0
    events: int = 0
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)

    def note(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < _MAX_EXAMPLES:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True)
class _Case:
    prompt: list[int]
    params: SamplingParams
    body: bytes
    text: str
    num_tokens: int


class Clients:
    """As many as asked for, in this process's event loop; `tally` may be replaced by a new one at any time.

    Args:
        url: of the HTTP API; empty = they all share one gRPC stream to the coordinator at `address`.
    """

    def __init__(self, url: str, address: str, number: int) -> None:
        self._http = HttpClient(url) if url else None
        self._grpc = AsyncClient(address)
        self._number = number
        self._cases = _make_cases()
        self._tasks: list[asyncio.Task[None]] = []
        self._stops = False
        self.tally = Tally()

    def start(self) -> None:
        """Begins all of them."""
        self._tasks = [asyncio.create_task(self._work(index)) for index in range(self._number)]

    async def stop(self) -> None:
        """Lets running requests end."""
        self._stops = True
        await asyncio.gather(*self._tasks)
        await self._grpc.close()
        if self._http is not None:
            await self._http.close()

    async def _work(self, index: int) -> None:
        order = random.Random(index).sample(self._cases, len(self._cases))
        for case in itertools.cycle(order):
            if self._stops:
                return
            try:
                await (self._ask_grpc(case) if self._http is None else self._ask(self._http, case))
            except SpecwireError as error:
                self.tally.note(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)  # what failed at once would fail as fast as this process can ask

    async def _ask_grpc(self, case: _Case) -> None:
        started_s, ttft_s, token_ids = time.monotonic(), 0.0, []
        live = await self._grpc.start(GenerateRequest(case.prompt, case.params))
        try:
            while deltas := await live.read():
                ttft_s = ttft_s or time.monotonic() - started_s
                for delta in deltas:
                    token_ids += delta.token_ids
                    self.tally.events += 1
        finally:
            live.cancel()
        if bytes(token_ids).decode() != case.text:
            self.tally.note("an answer has other tokens than the target alone gives")
        self._count(case, ttft_s)

    async def _ask(self, http: HttpClient, case: _Case) -> None:
        started_s, ttft_s, parts = time.monotonic(), 0.0, []
        async with http.request("POST", "/v1/completions", case.body) as answer:
            async for data in answer.chunks():
                ttft_s = ttft_s or time.monotonic() - started_s
                parts.append(data)
        body = b"".join(parts).decode()
        if answer.status != 200:
            self.tally.note(f"status {answer.status}: {body[:200]}")
            return
        *events, done, rest = body.split("\n\n")
        values = [json.loads(event.removeprefix("data: ")) for event in events]
        problem = _problem_of(case, values, is_done=(done, rest) == ("data: [DONE]", ""))
        if problem:
            self.tally.note(problem)
        self.tally.events += len(values) - 1
        self._count(case, ttft_s)

    def _count(self, case: _Case, ttft_s: float) -> None:
        self.tally.answers += 1
        self.tally.tokens += case.num_tokens
        self.tally.ttfts_s.append(ttft_s)


def _problem_of(case: _Case, events: list[Any], *, is_done: bool) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if not is_done or not events:
        return "a stream ended without [DONE], or with two of them"
    *parts, last = events
    choices = [part["choices"][0] for part in parts]
    if [choice["finish_reason"] for choice in choices if choice["finish_reason"]] != ["length"]:
        return f"a stream had the finish reasons {[choice['finish_reason'] for choice in choices]}"
    if last["usage"]["completion_tokens"] != case.num_tokens:
        return f"an answer of {case.num_tokens} tokens has the usage {last['usage']}"
    if "".join(choice["text"] for choice in choices) != case.text:
        return "an answer has another text than the target alone gives"
    return ""


def _make_cases() -> list[_Case]:
    target, rng = Target(LETTERS), random.Random(0)
    cases = []
    for seed in range(_NUM_CASES):
        prompt = rng.choices(LETTERS, k=PROMPT_LEN)
        num_tokens = rng.randint(_MIN_TOKENS, MAX_TOKENS)
        body = {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True, "stream": True}
        message = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True)
        cases.append(_Case(prompt, params, message, bytes(target.generate(prompt, num_tokens, seed)).decode(), num_tokens))
    return cases
