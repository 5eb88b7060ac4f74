"""Drafter invariance: the same requests through many configurations of services must give the reference's tokens.

Shared by the tests and by benchmarks/invariance.py.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from specwire.client.results import StreamEvent
from specwire.messages import DraftCost, SpecStats
from specwire.policy.curves import DraftCurve
from tests.drafter.helpers import ScriptedMethod, serve_drafter

from .matrix import BATCH_SIZE, Case, Configuration
from .reference import Expected, num_threads
from .stack import NUM_THREADS, Fleet, coordinate

_WAVE_TOKENS = 8
"""Tokens that every request of a wave has before the next wave starts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a case first differs from the reference, and whether a near tie there excuses it (design section 3)."""

    case: Case
    position: int
    expected: list[int]
    got: list[int]
    is_excused: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a configuration gave over all cases."""

    configuration: Configuration
    num_requests: int
    num_tokens: int  # compared with the reference
    differences: list[Difference]
    spec: SpecStats  # summed
    num_verifier_losses: int
    num_drafter_losses: int
    num_k_zero_steps: int  # steps of sequences without drafts

    @property
    def first_draft_acceptance(self) -> float:
        """Share of first drafts that were accepted."""
        per_position = self.spec.accepted_per_position
        return per_position[0] / self.spec.num_drafts if self.spec.num_drafts else 0.0

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        spec, excused = self.spec, [d for d in self.differences if d.is_excused]
        return {
            "configuration": self.configuration.name,
            "requests": self.num_requests,
            "tokens_compared": self.num_tokens,
            "differences_excused": len(excused),
            "differences": len(self.differences) - len(excused),
            "drafts": spec.num_drafts,
            "draft_tokens": spec.num_draft_tokens,
            "accepted_tokens": spec.num_accepted_tokens,
            "first_draft_acceptance": round(self.first_draft_acceptance, 3),
            "acceptance_length": round(spec.acceptance_length, 3),
            "steps_without_drafts": self.num_k_zero_steps,
            "preemptions": spec.num_preemptions,
            "verifier_losses": self.num_verifier_losses,
            "drafter_losses": self.num_drafter_losses,
        }


async def run(configuration: Configuration, fleet: Fleet, socket_dir: Path, cases: Sequence[Case], expected: Mapping[int, Expected]) -> Outcome:
    """Runs the cases, twelve at a time, and compares them with the reference.

    Args:
        expected: by index of the case.
    """
    events: dict[int, list[StreamEvent]] = {}
    verifier_losses = drafter_losses = 0
    for start in range(0, len(cases), BATCH_SIZE):
        group = dict(enumerate(cases[start : start + BATCH_SIZE], start))
        async with AsyncExitStack() as resources:
            services = dict(zip(configuration.services, fleet.get(*configuration.services), strict=True))
            addresses = {name: service.address for name, service in services.items()}
            if "garbage" in configuration.drafters:
                server = await resources.enter_async_context(serve_drafter(socket_dir, build=lambda _: ScriptedMethod(Garbage())))
                addresses["garbage"] = server.addresses[0]
            stack = await resources.enter_async_context(
                coordinate(
                    socket_dir, [addresses[name] for name in configuration.verifiers], [addresses[name] for name in configuration.drafters],
                    speculation=dict(configuration.speculation), max_outstanding_rounds=configuration.max_outstanding_rounds,
                    **configuration.coordinator,
                )
            )  # fmt: skip
            if configuration.has_free_drafts:
                for link in (link for lane in stack.engine.lanes for link in lane.links):
                    link.drafter.curve = DraftCurve([DraftCost(1, 1, 1e-3)])
            half = sum(len(expected[index].token_ids) for index in group) // 2
            on_half = services[configuration.kill].kill if configuration.kill else None
            progress = _Progress(half, on_half)

            async def generate(index: int, case: Case) -> None:
                async for event in stack.client.stream(case.prompt_token_ids, case.params):  # noqa: B023 - awaited in this iteration
                    events.setdefault(index, []).append(event)
                    progress.add(index, len(event.token_ids))  # noqa: B023

            await _in_waves(configuration.waves, [(index, generate(index, case)) for index, case in group.items()], progress)
            verifier_losses += stack.engine.counters.num_verifier_losses
            drafter_losses += stack.engine.counters.num_drafter_losses
    return _outcome(configuration, cases, expected, events, verifier_losses, drafter_losses)


class Garbage:
    """A drafter's method gone mad: random ids, the sequence's own tokens in disorder, ids that are none, far too many drafts, none."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, tokens: list[int], num_drafts: int) -> list[int]:
        kind = self._random.randrange(6)
        if kind == 0:
            return [self._random.randrange(49_152) for _ in range(num_drafts)]
        if kind == 1:
            return [-1] * num_drafts
        if kind == 2:
            return [49_152 + self._random.randrange(1 << 20) for _ in range(num_drafts)]
        if kind == 3:
            return [self._random.choice(tokens) for _ in range(num_drafts + 100)]
        if kind == 4:
            return []
        return [self._random.choice(tokens) for _ in range(num_drafts)]


class _Progress:
    """Counts tokens, of all requests and of each; calls on_half once when half of all have come."""

    def __init__(self, half: int, on_half: Callable[[], None] | None) -> None:
        self._left = half
        self._on_half = on_half
        self._num_tokens: dict[int, int] = {}
        self._news = asyncio.Event()

    def add(self, index: int, num_tokens: int) -> None:
        self._num_tokens[index] = self._num_tokens.get(index, 0) + num_tokens
        self._left -= num_tokens
        self._news.set()
        if self._left <= 0 and self._on_half is not None:
            on_half, self._on_half = self._on_half, None
            on_half()

    async def reached(self, index: int, num_tokens: int) -> None:
        """Returns once a request has as many tokens."""
        while self._num_tokens.get(index, 0) < num_tokens:
            self._news.clear()
            await self._news.wait()


async def _in_waves(waves: tuple[int, ...], jobs: "Sequence[tuple[int, Any]]", progress: _Progress) -> None:
    """Starts jobs in waves; (1,) runs them one after the other."""
    if waves == (1,):
        for _, job in jobs:
            await job
        return
    left = list(jobs)
    async with asyncio.TaskGroup() as tasks:
        for size in (*waves, len(jobs)):
            wave, left = left[:size], left[size:]
            running = {index: tasks.create_task(job) for index, job in wave}
            for index, task in running.items():
                if left:
                    waiting = asyncio.ensure_future(progress.reached(index, _WAVE_TOKENS))
                    await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()


def _outcome(
    configuration: Configuration, cases: Sequence[Case], expected: Mapping[int, Expected], events: Mapping[int, list[StreamEvent]],
    verifier_losses: int, drafter_losses: int,
) -> Outcome:  # fmt: skip
    num_tokens, differences, spec, num_plain_steps = 0, [], SpecStats(), 0
    for index, case in enumerate(cases):
        got = [token_id for event in events[index] for token_id in event.token_ids]
        last = events[index][-1]
        assert last.spec is not None, f"{case} ended without statistics"
        difference = compare(case, expected[index], got, last.finish_reason)
        num_tokens += len(got) if difference is None else difference.position + 1
        if difference is not None:
            differences.append(difference)
        spec = add_spec(spec, last.spec)
        num_plain_steps += last.spec.num_steps - last.spec.num_drafts
    return Outcome(configuration, len(cases), num_tokens, differences, spec, verifier_losses, drafter_losses, num_plain_steps)


def compare(case: Case, expected: Expected, got: list[int], finish_reason: str | None) -> Difference | None:
    """The first difference in tokens; None if they are all equal and the request ended for the same reason."""
    if got == expected.token_ids:
        assert finish_reason == expected.finish_reason, f"{case} ended with {finish_reason}, but should with {expected.finish_reason}"
        return None
    pairs = zip(got, expected.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected.token_ids)))
    # A text that ends early or goes on is no near tie of anything.
    is_excused = position < min(len(got), len(expected.token_ids)) and expected.margins[position].is_near_tie
    return Difference(case, position, expected.token_ids, got, is_excused)


def add_spec(left: SpecStats, right: SpecStats) -> SpecStats:
    """Sums of both."""
    pairs = [(a, b) for a, b in zip(_padded(left, right), _padded(right, left), strict=True)]
    return SpecStats(
        num_drafts=left.num_drafts + right.num_drafts,
        num_draft_tokens=left.num_draft_tokens + right.num_draft_tokens,
        num_accepted_tokens=left.num_accepted_tokens + right.num_accepted_tokens,
        accepted_per_position=tuple(a + b for a, b in pairs),
        num_steps=left.num_steps + right.num_steps,
        num_preemptions=left.num_preemptions + right.num_preemptions,
        synthetic=left.synthetic or right.synthetic,
    )


def _padded(spec: SpecStats, other: SpecStats) -> tuple[int, ...]:
    counts = spec.accepted_per_position
    return counts + (0,) * (len(other.accepted_per_position) - len(counts))


def check(outcome: Outcome) -> None:
    """Asserts that no token differs without excuse, and that the configuration did what it is there for."""
    configuration, spec = outcome.configuration, outcome.spec
    wrong = [difference for difference in outcome.differences if not difference.is_excused]
    assert not wrong, f"{configuration.name}: {len(wrong)} texts differ, the first in {wrong[0]}"
    assert outcome.num_tokens > 0, f"{configuration.name} compared nothing"
    if configuration.drafters:
        assert spec.num_draft_tokens > 0, f"{configuration.name} drafted nothing"
        assert spec.num_accepted_tokens > 0 or not configuration.accepts, f"{configuration.name}: none of {spec.num_draft_tokens} drafts was accepted"
    else:
        assert spec.num_draft_tokens == 0, f"{configuration.name} has no drafter, but {spec.num_draft_tokens} drafts"
    if configuration.preempts:
        assert spec.num_preemptions > 0, f"{configuration.name} preempted nothing"
    if configuration.kill:
        losses = outcome.num_verifier_losses if configuration.kill in configuration.verifiers else outcome.num_drafter_losses
        assert losses > 0, f"{configuration.name}: nobody noticed"
    if configuration.name == "schedule crossing K=0":
        # The first step of each request, its prefill, has no drafts either.
        assert outcome.num_k_zero_steps > 2 * outcome.num_requests, f"{configuration.name} was hardly ever at K=0"


def transformers_greedy(folder: Path, cases: Sequence[Case]) -> list[list[int]]:
    """What transformers' own generate gives for greedy cases, one by one in float32."""
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    with num_threads(NUM_THREADS):
        for case in cases:
            assert case.params.is_greedy, f"{case} is not greedy"
            output = model.generate(torch.tensor([case.prompt_token_ids]), do_sample=False, max_new_tokens=case.params.max_tokens, pad_token_id=0)
            texts.append(output[0, len(case.prompt_token_ids) :].tolist())
    return texts
