"""Steady decoding in front of a coordinator: all requests on one Session stream, a window of whole messages in which all of them decode."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.gpu.stack import Served
from specwire.messages import CoordinatorStatus, GenerateRequest, SessionStart
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import generate

_SESSION = "/specwire.v1.CoordinatorService/Session"
_SILENCE_S = 60.0
T = TypeVar("T")


class Batch:
    """Requests that run; cancelled at the end of this context.

    Attributes:
        counts: tokens of each; num_tokens: of all.
        num_done: requests that have ended; num_cached_tokens: of their prompts, those that came from the verifier's prefix cache.
        now_s: when the last message was read, in time.perf_counter().
    """

    def __init__(self, channel: Any, requests: Sequence[GenerateRequest]) -> None:
        self.counts = [0] * len(requests)
        self.num_tokens = self.num_done = self.num_cached_tokens = 0
        self.now_s = 0.0
        self._requests = requests
        self._call = channel.stream_stream(_SESSION, request_serializer=pb.SessionRequest.SerializeToString)()
        self._is_cancelled = False

    async def __aenter__(self) -> "Batch":
        starts = [generate.pack_start(SessionStart(index, request)) for index, request in enumerate(self._requests, start=1)]
        self.now_s = time.perf_counter()
        await self._call.write(generate.pack_command(starts, ()))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self.num_done < len(self.counts):
            self._is_cancelled = True
            await self._call.write(generate.pack_command((), range(1, len(self.counts) + 1)))
            while self.num_done < len(self.counts):
                await self.read()
        self._call.cancel()

    async def read(self) -> None:
        """The next message.

        Raises:
            TimeoutError: none came for a minute.
        """
        async with asyncio.timeout(_SILENCE_S):
            data = await self._call.read()
        self.now_s = time.perf_counter()
        update = generate.unpack_update(pb.SessionResponse.FromString(data))
        for delta in update.deltas:
            self._count(delta.stream_id, len(delta.token_ids))
        for event in update.events:
            assert event.error is None or self._is_cancelled, f"request {event.stream_id} failed: {event.error}"
            if event.choice is not None:
                self._count(event.stream_id, len(event.choice.token_ids))
                self.num_cached_tokens += event.choice.usage.num_cached_tokens if event.choice.usage is not None else 0
            self.num_done += event.done

    async def read_beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Reads on until the work is done."""
        task = asyncio.create_task(work)
        while not task.done():
            await self.read()
        return task.result()

    def _count(self, stream_id: int, number: int) -> None:
        self.counts[stream_id - 1] += number
        self.num_tokens += number


@dataclass(frozen=True, slots=True)
class Window:
    """What a window has shown.

    Args:
        num_tokens: that came in it, of all sequences.
        cached_tokens: of a prompt, that were not computed.
        before, after: the coordinator's state around it.
    """

    count: int
    num_tokens: int
    seconds: float
    cached_tokens: float
    before: CoordinatorStatus
    after: CoordinatorStatus

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of a sequence."""
        generated = self._grown("num_generated_tokens")
        assert generated > 0, f"{self.num_tokens} tokens came in a window around which the coordinator counts none: the client reads far behind it"
        return 1 / (1 - self._grown("num_accepted_tokens") / generated)

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds * self.count * self.tokens_per_step / self.num_tokens

    @property
    def drafts_per_step(self) -> float:
        """Verified ones, of a sequence."""
        return self._grown("num_draft_tokens") / self._num_rows

    @property
    def asked_per_step(self) -> float:
        """Drafts that came with adaptive verification, of a sequence."""
        before, after = (status.lanes[0].policy.num_offered_tokens for status in (self.before, self.after))
        return (after - before) / self._num_rows

    @property
    def acceptance(self) -> float | None:
        """Share of the verified drafts that were accepted; None without any."""
        verified = self._grown("num_draft_tokens")
        return self._grown("num_accepted_tokens") / verified if verified else None

    @property
    def num_fallbacks(self) -> int:
        """Sequences and steps that went without drafts though there should have been some."""
        return sum(self.after.fallbacks_by_cause.values()) - sum(self.before.fallbacks_by_cause.values())

    @property
    def _num_rows(self) -> float:
        """Steps, summed over the sequences."""
        return self._grown("num_generated_tokens") / self.tokens_per_step

    def _grown(self, name: str) -> int:
        return getattr(self.after, name) - getattr(self.before, name)


async def measure_window(served: Served, requests: Sequence[GenerateRequest], num_settle: int, num_measured: int) -> Window:
    """Runs requests, and ends them once the window is over.

    Args:
        num_settle: tokens of a sequence before the window, on average; every sequence must decode by then.
        num_measured: in the window.
    """
    count = len(requests)
    async with Batch(served.channel, requests) as batch:
        while batch.num_tokens < count * num_settle or not all(batch.counts):
            await batch.read()
        before = await batch.read_beside(served.status())
        started_s, num_before = batch.now_s, batch.num_tokens
        while batch.num_tokens - num_before < count * num_measured:
            await batch.read()
            assert not batch.num_done, f"one of {count} requests ended in the window, with {max(batch.counts)} tokens; allow them more"
        seconds, num_tokens = batch.now_s - started_s, batch.num_tokens - num_before
        after = await batch.read_beside(served.status())
    return Window(count, num_tokens, seconds, batch.num_cached_tokens / count, before, after)


async def run_to_end(served: Served, requests: Sequence[GenerateRequest]) -> float:
    """Seconds until the last token of the last request."""
    async with Batch(served.channel, requests) as batch:
        started_s = batch.now_s
        while batch.num_done < len(requests):
            await batch.read()
    return batch.now_s - started_s
