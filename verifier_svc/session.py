"""Who may use the verifier, and the queue of rounds between an event loop and the threads that run them. Everything here runs in the event loop."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

from specwire.errors import AbortedError, FailedPreconditionError, InternalError, InvalidArgumentError, SpecwireError, UnavailableError
from specwire.futures import unwatched
from specwire.messages import Hello, VerifyResult, VerifyRound, Welcome

from .metrics import VerifierMetrics
from .worker import RoundWorker

logger = logging.getLogger(__name__)

_MAX_FAULTS = 5
"""Rounds in a row that fail for no reason of their own, after which the verifier is taken for broken. A coordinator gives a request six
attempts: one outlives a device that broke, and one that itself is the reason costs at most one new start of the verifier."""


class VerifySession:
    """One Verify stream: rounds in, answers out, in order and at most `max_outstanding_rounds` at a time.

    Args:
        worker: runs the rounds.
        hello: who opened the stream.
        max_outstanding_rounds: W.
        count: takes every answer to rows, or the fault in its place.
    """

    def __init__(self, worker: RoundWorker, hello: Hello, max_outstanding_rounds: int, count: Callable[[VerifyResult | Exception], None]) -> None:
        self.hello = hello
        self._count = count
        self.max_outstanding_rounds = max_outstanding_rounds
        self._worker = worker
        self._queued: deque[VerifyRound] = deque()  # not launched yet
        self._answers: asyncio.Queue[asyncio.Future[VerifyResult] | VerifyResult | BaseException | None] = asyncio.Queue()
        self._unanswered: deque[asyncio.Future[VerifyResult]] = deque()
        self._last_round = 0
        self._is_closed = False  # takes no more rounds
        self._failure: SpecwireError | None = None  # ends the stream at once

    def submit(self, request: VerifyRound) -> None:
        """Queues a round for the worker.

        Raises:
            InvalidArgumentError: rounds do not ascend.
            FailedPreconditionError: more than W rounds are outstanding.
        """
        if self._is_closed:
            return
        if request.round <= self._last_round:
            raise InvalidArgumentError(f"round {request.round} follows round {self._last_round}; number rounds upwards from 1")
        if len(self._unanswered) >= self.max_outstanding_rounds:
            raise FailedPreconditionError(
                f"round {request.round} would be outstanding beside {len(self._unanswered)} others, but max_outstanding_rounds is "
                f"{self.max_outstanding_rounds} here; wait for an answer first"
            )
        self._last_round = request.round
        answer = asyncio.wrap_future(self._worker.run(request, self._queued))
        self._unanswered.append(answer)
        self._answers.put_nowait(answer)

    async def results(self) -> AsyncIterator[VerifyResult]:
        """Answers in the order of the rounds, until the session is closed; raises what it was closed or failed with."""
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, VerifyResult):
                yield answer
                continue
            try:
                result = await answer
            except asyncio.CancelledError:
                if self._failure is not None:
                    raise self._failure from None
                raise
            except Exception as error:
                self._count(error)
                raise
            self._count(result)
            self._unanswered.popleft()
            yield result

    def announce(self, result: VerifyResult) -> None:
        """Says something that answers no round, after the answers that are due."""
        if not self._is_closed:
            self._answers.put_nowait(result)

    def close(self, error: BaseException | None = None) -> None:
        """Takes no more rounds; the outstanding ones are answered, then `results` ends, or raises `error`."""
        if not self._is_closed:
            self._is_closed = True
            self._answers.put_nowait(error)

    def fail(self, error: SpecwireError) -> None:
        """Ends the session now: rounds that are not launched are dropped, the others are not answered."""
        self._is_closed = True
        self._failure = error
        for answer in self._unanswered:
            answer.cancel()
        self._answers.put_nowait(error)


class SessionGate:
    """Lets one coordinator in at a time (design section 1).

    Args:
        worker: runs the sessions' rounds.
        instance_id: of this verifier.
        max_outstanding_rounds: W of this side.
        metrics: counts sessions and faults.

    Attributes:
        is_free: nobody holds the verifier.
        broken: fails with InternalError once rounds keep failing.
    """

    def __init__(self, worker: RoundWorker, instance_id: str, max_outstanding_rounds: int, metrics: VerifierMetrics) -> None:
        self._worker = worker
        self._instance_id = instance_id
        self._max_outstanding_rounds = max_outstanding_rounds
        self._holder: VerifySession | None = None
        self._is_open = True
        self._metrics = metrics
        self._num_faults = 0
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.broken: asyncio.Future[None] = unwatched(asyncio.get_running_loop().create_future())

    def enter(self, hello: Hello) -> tuple[VerifySession, Welcome]:
        """Starts a session. The same coordinator's older or equal incarnation loses its own at once.

        Raises:
            FailedPreconditionError: another coordinator or a later incarnation holds the verifier.
            InvalidArgumentError: hello is incomplete.
            UnavailableError: the verifier is stopping.
        """
        try:
            self._check(hello)
        except SpecwireError:
            self._metrics.num_refused += 1
            raise
        if self._holder is not None:
            self._metrics.num_takeovers += 1
            text = f"taken over by a new stream of coordinator {hello.coordinator_id!r}, incarnation {hello.incarnation}"
            self.leave(self._holder, text)
        max_outstanding_rounds = min(self._max_outstanding_rounds, hello.max_outstanding_rounds)
        self.is_free.clear()
        self._holder = VerifySession(self._worker, hello, max_outstanding_rounds, self._count)
        self._metrics.num_sessions += 1
        self._metrics.is_held = True
        logger.info("coordinator %s, incarnation %d, holds this verifier; W = %d", hello.coordinator_id, hello.incarnation, max_outstanding_rounds)
        # Slots of earlier sessions close before the first round of this one can start, so all blocks are free to it.
        return self._holder, Welcome(self._instance_id, max_outstanding_rounds, self._worker.num_blocks)

    def _check(self, hello: Hello) -> None:
        """Raises what `enter` raises."""
        if not self._is_open:
            raise UnavailableError("the verifier is stopping; use another one")
        if not hello.coordinator_id or hello.max_outstanding_rounds < 1:
            raise InvalidArgumentError(
                f"hello names the coordinator {hello.coordinator_id!r} and {hello.max_outstanding_rounds} outstanding rounds; "
                "send a non-empty id and at least 1"
            )
        if self._holder is None:
            return
        held = self._holder.hello
        if held.coordinator_id != hello.coordinator_id:
            raise FailedPreconditionError(
                f"coordinator {held.coordinator_id!r} holds this verifier, and {hello.coordinator_id!r} cannot have it too; "
                "stop the holder, or give each coordinator its own verifiers"
            )
        if hello.incarnation < held.incarnation:
            raise FailedPreconditionError(
                f"incarnation {held.incarnation} of coordinator {held.coordinator_id!r} holds this verifier, and {hello.incarnation} is older; "
                "stop the older process, or give it another coordinator_id and verifiers"
            )

    def leave(self, session: VerifySession, reason: str = "its stream ended") -> None:
        """Ends a session: queued rounds are dropped, launched ones finish, then its slots close. Later calls for the same session do nothing."""
        if session is not self._holder:
            return
        self._holder = None
        self._metrics.is_held = False
        self.is_free.set()
        session.fail(AbortedError(reason))
        self._worker.reset().add_done_callback(_log_failure)
        logger.info(
            "coordinator %s, incarnation %d, no longer holds this verifier: %s", session.hello.coordinator_id, session.hello.incarnation, reason
        )

    def drain(self) -> None:
        """Lets nobody in any more and tells the holder to go on elsewhere; what it still sends is answered."""
        self._is_open = False
        if self._holder is not None:
            self._holder.announce(VerifyResult(0, 0, 0, draining=True))

    def shut(self) -> None:
        """Lets nobody in any more; the holder's outstanding rounds are answered, then its stream ends with UNAVAILABLE."""
        self._is_open = False
        if self._holder is not None:
            self._holder.close(UnavailableError("the verifier is stopping; reopen the sequences on another one"))

    def evict(self) -> None:
        """Ends the holder's session now, if there is one."""
        if self._holder is not None:
            self.leave(self._holder, "the verifier stops")

    def _count(self, outcome: VerifyResult | Exception) -> None:
        """Counts rounds that failed in a row for no reason of their own; one whose rows are answered starts the count anew."""
        if isinstance(outcome, VerifyResult):
            self._num_faults = 0 if outcome.rows else self._num_faults
        elif not isinstance(outcome, SpecwireError):
            self._num_faults += 1
            self._metrics.num_faults += 1
            if self._num_faults >= _MAX_FAULTS and not self.broken.done():
                text = f"{self._num_faults} rounds in a row failed, the last one with {type(outcome).__name__}: {outcome}"
                self.broken.set_exception(InternalError(f"{text}; the verifier ends, to be started anew"))


def _log_failure(reset: Future[None]) -> None:
    if not reset.cancelled() and (error := reset.exception()) is not None:
        logger.error("closing the slots of an ended session failed", exc_info=error)
