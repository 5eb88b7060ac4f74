"""The one thread that owns the drafting method and every session's sequences.

Rounds come first and are merged into one batch; between them background work runs in bounded chunks.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple

from specwire.errors import InternalError, SpecwireError
from specwire.messages import DraftResult, DraftRound, DraftRowResult, RoundTiming
from specwire.proposals import join_proposals
from specwire.tracing import Tracer

from .cost import DraftProfile, measure_draft_cost
from .method import Ask, Method
from .metrics import DrafterMetrics
from .session import SequencePool, Session
from .spans import trace_draft

logger = logging.getLogger(__name__)

_MAX_FAULTS = 5
"""Batches in a row that fail for no reason of their own, after which the drafter is taken for broken: only a new process gets a device back."""
_MAX_BATCHES_BEFORE_CHUNK = 4
"""Batches in a row that may delay waiting background work: rounds of many lanes must not starve new sequences."""

_ANSWER_S = 0.001
"""What the event loop is given to send a batch's answers before background work begins: launches from Python keep the interpreter for themselves for
milliseconds."""


class _Job(NamedTuple):
    """A message of a session, or, without one, its end."""

    session: Session
    message: DraftRound | None
    received_ns: int


class Worker:
    """Runs rounds in the order of their arrival. All public methods return at once and may be called from any thread.

    Args:
        build: makes the method, on the worker's own thread.
        max_num_seqs: most sequences over all sessions.
        chunk: most tokens of background work between two batches; fewer where the measurement says that they would delay replies.
        cost_budget_s: time for the measurement of draft costs at the start; 0 = none.
        profile_context_len: tokens of context to measure them behind, as far as they fit.
        tracer: takes the spans of rounds.
    """

    def __init__(
        self,
        build: Callable[[], Method],
        *,
        max_num_seqs: int,
        chunk: int,
        cost_budget_s: float = 3.0,
        profile_context_len: int = 0,
        tracer: Tracer | None = None,
    ) -> None:
        self.ready: Future[Method] = Future()
        """Resolves when the method is made and measured, or to the error that kept it from that."""
        self.broken: Future[None] = Future()
        """Fails with InternalError once batches keep failing."""
        self.profile = DraftProfile()
        self.pool = SequencePool(max_num_seqs)
        self.metrics = DrafterMetrics(self.pool, tracer)
        self._build = build
        self._chunk = chunk
        self._tracer = tracer
        self._cost_budget_s = cost_budget_s
        self._profile_context_len = profile_context_len
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._num_faults = 0  # since the last batch that was drafted
        self._sessions: set[Session] = set()  # the thread's own
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_session(self, label: str, deliver: Callable[[DraftResult | SpecwireError | None], None]) -> Session:
        """A session of the ready method. Every message that is submitted for it is answered once through `deliver`, in order, on the
        worker's thread: a result, None if the message has no rows, or the error that ended the session (nothing follows it)."""
        return Session(label, self.ready.result(timeout=0), self.pool, deliver)

    def submit(self, session: Session, message: DraftRound, received_ns: int) -> None:
        self._put(_Job(session, message, received_ns))

    def close_session(self, session: Session) -> None:
        """Frees the session's sequences after the messages already submitted."""
        self._put(_Job(session, None, 0))

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the work in hand; False if it did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, job: _Job) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        # From here on nobody can cancel the future.
        self.ready.set_running_or_notify_cancel()
        try:
            method = self._build()
            self.metrics.watch_passes(method.counts)
            if method.features is not None:
                self.metrics.watch_features(method.features.counts)
            if self._cost_budget_s:
                self.profile = measure_draft_cost(method, self._cost_budget_s, chunk=self._chunk, context_len=self._profile_context_len)
                method.counts.reset()
                self._limit_chunk()
        except Exception as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(method)
        try:
            self._work(method)
        except Exception as error:  # a fault of ours outside a method: whoever waits for answers must not wait for ever
            self._fail(list(self._sessions), error, "answering")
            if not self.broken.done():
                text = f"{type(error).__name__}: {error}"
                self.broken.set_exception(InternalError(f"the drafter's thread failed with {text}; the drafter ends, to be started anew"))

    def _work(self, method: Method) -> None:
        """Batches and chunks, until the worker stops."""
        is_behind, num_batches = False, 0
        while (jobs := self._take(wait=not is_behind)) is not None:
            if jobs:
                self._serve(method, jobs)
                is_behind, num_batches = True, num_batches + 1
                self._let_answers_out()
            if is_behind and (not self._jobs or num_batches >= _MAX_BATCHES_BEFORE_CHUNK):
                is_behind, num_batches = self._catch_up(method), 0
        for session in self._sessions:
            session.close()
        if method.features is not None:
            method.features.stop()

    def _limit_chunk(self) -> None:
        """Rounds that come during a chunk wait for its end: no longer than coordinators wait for their answers."""
        if 0 < self.profile.chunk < self._chunk:
            logger.info("prompts are computed in chunks of %d tokens, not %d, so that rounds need not wait longer", self.profile.chunk, self._chunk)
            self._chunk = self.profile.chunk

    def _take(self, *, wait: bool) -> list[_Job] | None:
        """The jobs of the next batch; none where there are none and `wait` is not set; None at the end.

        A batch ends before a second message of a session whose first one has rows: its commits come after those rows.
        """
        with self._wake:
            while wait and not self._jobs and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return None
            jobs: list[_Job] = []
            with_rows: set[Session] = set()
            while self._jobs and self._jobs[0].session not in with_rows:
                job = self._jobs.popleft()
                jobs.append(job)
                if job.message is not None and job.message.rows:
                    with_rows.add(job.session)
            return jobs

    def _let_answers_out(self) -> None:
        """Sleeps for a moment, or until there is a job."""
        with self._wake:
            if not self._jobs and not self._stopping:
                self._wake.wait(_ANSWER_S)

    def _serve(self, method: Method, jobs: list[_Job]) -> None:
        started_ns = time.time_ns()
        planned: list[tuple[_Job, DraftRound, list[Ask | DraftRowResult]]] = []
        for job in jobs:
            plans = self._apply(job)
            if plans is not None and job.message is not None:
                planned.append((job, job.message, plans))
        asks = [plan for _, _, plans in planned for plan in plans if isinstance(plan, Ask)]
        try:
            drafts = method.propose(asks) if asks else []
        except Exception as error:
            for job, message, _ in planned:
                trace_draft(self._tracer, message, RoundTiming(job.received_ns, started_ns, time.time_ns()), error)
            self._fail([job.session for job, _, _ in planned], error, "drafting")
            self._note_fault(error)
            return
        finished_ns = time.time_ns()
        reading = None if method.features is None else method.features.counts.take_reading()
        if asks:
            self._num_faults = 0
            self.metrics.batch_drafted(started_ns, finished_ns)
        left, proposes = iter(drafts), any(one.proposals is not None for one in drafts)
        for job, message, plans in planned:
            own, proposals = left, None
            if proposes:
                mine = list(islice(left, sum(isinstance(plan, Ask) for plan in plans)))
                own, proposals = iter(mine), join_proposals([(one.token_ids, one.proposals) for one in mine])
            rows = job.session.answer(message.rows, plans, own)
            timing = RoundTiming(job.received_ns, started_ns, finished_ns)
            if rows:
                self.metrics.round_answered(rows, started_ns - job.received_ns)
            trace_draft(self._tracer, message, timing, rows, reading)
            job.session.deliver(DraftResult(message.session, message.lane, message.round, rows, proposals, timing=timing) if rows else None)

    def _apply(self, job: _Job) -> list[Ask | DraftRowResult] | None:
        """Brings a session up to its message's state; None where nothing is to be answered (the session is over)."""
        session, message = job.session, job.message
        if message is None:
            session.close()
            self._sessions.discard(session)
        elif not session.closed:
            self._sessions.add(session)
            try:
                session.apply(message)
                return session.plan(message.rows)
            except Exception as error:
                self._fail([session], error, "a message's changes")
        return None

    def _catch_up(self, method: Method) -> bool:
        """One chunk of background work; whether there may be more."""
        try:
            num_tokens = method.catch_up(self._chunk)
        except Exception as error:
            # Which sequence it was is unknown: all streams start over.
            self._fail(list(self._sessions), error, "catching up")
            self._note_fault(error)
            return False
        if method.features is not None:
            method.features.counts.take_reading()  # no round's
        self.metrics.num_catch_up_tokens += num_tokens
        return num_tokens > 0

    def _note_fault(self, error: Exception) -> None:
        """Counts batches and chunks that failed in a row for no reason of their own."""
        if isinstance(error, SpecwireError):
            return
        self.metrics.num_faults += 1
        self._num_faults += 1
        if self._num_faults >= _MAX_FAULTS and not self.broken.done():
            text = f"{self._num_faults} batches in a row failed, the last one with {type(error).__name__}: {error}"
            self.broken.set_exception(InternalError(f"{text}; the drafter ends, to be started anew"))

    def _fail(self, sessions: list[Session], error: Exception, doing: str) -> None:
        """Ends sessions with an error; the others go on."""
        if not isinstance(error, SpecwireError):
            logger.error("unexpected error in %s", doing, exc_info=error)
            error = InternalError(f"{type(error).__name__} in {doing}; the drafter's log has the details")
        for session in sessions:
            if not session.closed:
                session.close()
                self._sessions.discard(session)
                session.deliver(error)
