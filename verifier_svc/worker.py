"""The threads that run rounds: one launches them, the other reads those that have to be waited for."""

import threading
import time
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specwire.messages import RoundTiming, VerifyResult, VerifyRound
from specwire.tracing import Tracer

from .metrics import VerifierMetrics
from .spans import trace_forward

if TYPE_CHECKING:  # brings torch
    from .launched import LaunchedRound
    from .verifier import Verifier


@dataclass(slots=True, eq=False)
class _Job:
    """One round on its way through the threads."""

    request: VerifyRound
    queued: deque[VerifyRound]
    answer: Future[VerifyResult]
    received_ns: int
    launched_ns: int = 0


class RoundWorker:
    """Launches each round as soon as it comes, though those before it may still run, and reads them in order.

    Args:
        verifier: used by one of the two threads at a time.
        launcher: an executor of one thread.
        reader: an executor of another one; used only if rounds are not done at their launch.
        metrics: takes the times of rounds.
        tracer: takes their spans.
    """

    def __init__(self, verifier: "Verifier", launcher: Executor, reader: Executor, metrics: VerifierMetrics, tracer: Tracer | None = None) -> None:
        self._verifier = verifier
        self._turn = threading.Lock()
        self._launcher = launcher
        self._reader = reader
        self._metrics = metrics
        self._tracer = tracer
        self._last_arrival_ns = 0

    @property
    def num_blocks(self) -> int:
        """KV blocks of the verifier."""
        return self._verifier.num_blocks

    def run(self, request: VerifyRound, queued: deque[VerifyRound]) -> Future[VerifyResult]:
        """Queues a round. It never runs if its future is cancelled before the launch.

        Args:
            queued: rounds of the session that are not launched; the request is appended, and taken off by the launch.
        """
        job = _Job(request, queued, Future(), time.time_ns())
        queued.append(request)
        self._launcher.submit(self._launch, job)
        return job.answer

    def reset(self) -> Future[None]:
        """Waits for the rounds that are launched, then closes all slots; before any round that is queued later."""
        return self._launcher.submit(self._reset)

    def _reset(self) -> None:
        with self._turn:
            self._verifier.reset()

    def _launch(self, job: _Job) -> None:
        if not job.answer.set_running_or_notify_cancel():
            return
        job.queued.popleft()
        job.launched_ns = time.time_ns()
        try:
            with self._turn:
                launched = self._verifier.launch(job.request)
                if self._verifier.num_unread_rounds > 1 or not launched.is_done():
                    self._reader.submit(self._read, job, launched)
                    return
                result = self._finish(job, launched, job.launched_ns)
        except Exception as error:
            self._fail(job, error)
        else:
            job.answer.set_result(result)

    def _read(self, job: _Job, launched: "LaunchedRound") -> None:
        """On the reader's thread."""
        try:
            launched.wait()
            arrived_ns = time.time_ns()
            with self._turn:
                result = self._finish(job, launched, arrived_ns)
        except Exception as error:
            self._fail(job, error)
        else:
            job.answer.set_result(result)

    def _finish(self, job: _Job, launched: "LaunchedRound", arrived_ns: int) -> VerifyResult:
        """A round's answer. It started when it was launched, or when the round before it was done: until then the model was not its own."""
        result = self._verifier.finish(launched)
        timing = RoundTiming(job.received_ns, max(job.launched_ns, self._last_arrival_ns), time.time_ns())
        self._last_arrival_ns = arrived_ns
        self._metrics.round_run(timing)
        trace_forward(self._tracer, job.request, timing, result)
        return replace(result, promised_blocks=self._verifier.num_promised_blocks(tuple(job.queued)), timing=timing)

    def _fail(self, job: _Job, error: Exception) -> None:
        trace_forward(self._tracer, job.request, RoundTiming(job.received_ns, job.launched_ns, time.time_ns()), error)
        job.answer.set_exception(error)
