"""Sends requests when they are due and notes what comes when. A request that fails is a result, never the end of the run."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from specwire.bench.record import INTERRUPTED, RequestRecord
from specwire.bench.workload import Prompt
from specwire.errors import InternalError, SpecwireError
from specwire.messages import ChoiceDelta

logger = logging.getLogger(__name__)

Send = Callable[[Prompt, RequestRecord], AsyncGenerator[ChoiceDelta, None]]
"""Sends a request and hands on what comes; raises a SpecwireError where it fails. Of the record it only writes
num_retries, and what an answer over HTTP says at its end: num_prompt_tokens, chunk_sizes, texts."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a run gave: a record of each request that was sent, in the order in which they were due.

    Attributes:
        interrupted: it was stopped before its end.
    """

    records: list[RequestRecord]
    start_s: float
    end_s: float
    interrupted: bool = False


class LoadGenerator:
    """Runs workloads, one at a time.

    Args:
        send: the backend.
        clock: seconds; what all times are of.
        max_concurrency: most requests at once; None = no limit.
        keep_tokens: records hold the answers' token ids.
        on_end: called with each record when its request has ended.
    """

    def __init__(
        self,
        send: Send,
        clock: Callable[[], float],
        *,
        max_concurrency: int | None = None,
        keep_tokens: bool = False,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        self._send = send
        self._clock = clock
        self._max_concurrency = max_concurrency
        self._keep_tokens = keep_tokens
        self._on_end = on_end
        self._records: list[RequestRecord] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, prompts: Sequence[Prompt], arrivals_s: Sequence[float] | None, stop: asyncio.Event | None = None) -> LoadRun:
        """Returns when every request has ended, or soon after `stop`.

        Args:
            arrivals_s: when each is due, in seconds from the start. Latencies count from there, also where the generator is late or holds
                requests back, so that a slow server can't hide its queue behind a client that waits (no coordinated omission).
                None = a closed loop: the next request is due when one has ended, and latencies count from when it is sent.
        """
        self._records = []
        start_s = self._clock()
        dispatching = asyncio.create_task(self._dispatch(prompts, arrivals_s, start_s))
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait([dispatching, stopping], return_when=asyncio.FIRST_COMPLETED)
            interrupted = not dispatching.done()
        finally:
            for task in (dispatching, stopping, *self._running):
                task.cancel()
            # In two steps: until it ends, the dispatcher may start another one.
            await asyncio.wait([dispatching, stopping])
            if self._running:
                await asyncio.wait(self._running)
        if not interrupted:
            dispatching.result()
        end_s = max((record.ended_s for record in self._records), default=start_s)
        return LoadRun(self._records, start_s, end_s, interrupted)

    async def _dispatch(self, prompts: Sequence[Prompt], arrivals_s: Sequence[float] | None, start_s: float) -> None:
        turns = asyncio.Semaphore(self._max_concurrency or max(1, len(prompts)))

        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            turns.release()

        for index, prompt in enumerate(prompts):
            due_s = None if arrivals_s is None else start_s + arrivals_s[index]
            if due_s is not None and (pause_s := due_s - self._clock()) > 0:
                await asyncio.sleep(pause_s)
            await turns.acquire()
            task = asyncio.create_task(self._follow(index, prompt, due_s))
            self._running.add(task)
            task.add_done_callback(ended)
        while self._running:
            await asyncio.wait(self._running)

    async def _follow(self, index: int, prompt: Prompt, due_s: float | None) -> None:
        """One request from its sending to its end."""
        sent_s = self._clock()
        record = RequestRecord(index, len(prompt.token_ids), sent_s if due_s is None else due_s, sent_s)
        self._records.append(record)
        try:
            async with contextlib.aclosing(self._send(prompt, record)) as deltas:
                async for delta in deltas:
                    self._take(record, delta)
            if not record.finish_reason or not record.chunk_sizes:
                raise InternalError(f"the answer ended with {record.num_output_tokens} tokens and finish reason {record.finish_reason!r}")
        except asyncio.CancelledError:
            record.error = INTERRUPTED
            raise
        except SpecwireError as error:
            record.error, record.error_text = type(error).__name__, str(error)
        except Exception as error:
            logger.exception("request %d failed", index)
            record.error, record.error_text = type(error).__name__, str(error)
        finally:
            if not record.is_ok:
                record.ended_s = self._clock()
            self._on_end(record)

    def _take(self, record: RequestRecord, delta: ChoiceDelta) -> None:
        now_s = self._clock()
        if delta.token_ids:
            record.chunk_times_s.append(now_s)
            record.chunk_sizes.append(len(delta.token_ids))
            if self._keep_tokens:
                record.token_ids += delta.token_ids
        if delta.spec_stats is not None:
            record.usage, record.spec, record.drafts = delta.usage, delta.spec_stats, delta.draft_report
        if delta.finish_reason is not None:
            record.ended_s = now_s
            record.finish_reason = delta.finish_reason.label
