"""The coordinator without its server: admits requests, keeps lanes and drafters connected, and says whether it can serve."""

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable
from functools import partial

from specwire.config import CoordinatorConfig
from specwire.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, SpecwireError, UnavailableError
from specwire.messages import CanaryAction, FinishReason, GenerateRequest, TokenizerSpec, VariantStatus
from specwire.policy.calibration import CalibrationStatistics
from specwire.policy.capacity import EngineDescription
from specwire.policy.effective import EffectiveSetting

from .admission import Admission, check_request
from .balance import Balancer
from .canary import set_canary
from .counters import Counters
from .discovery import Resolver, resolve_host
from .ending import end_sequence, fail_request, progress_of
from .fleet import Fleet
from .integrity import check_integrity
from .lane import Lane
from .loop import step
from .metrics import Metrics
from .peers import DrafterFactory, VerifierFactory
from .readiness import Readiness, ReadinessWatch
from .rpc import GrpcDrafter, GrpcVerifier
from .sequence import Request, Sequence
from .sink import Sink
from .stop import StopRules
from .target import Target
from .variants import Variants

logger = logging.getLogger(__name__)


class RequestHandle:
    """What a client may do with its request."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Ends the request at once; choices that are left get a delta with CANCELLED. Does nothing after its end."""
        self._cancel()


class Engine:
    """Serves requests over lanes and drafters.

    Args:
        config: addresses and limits.
        connect_verifier, connect_drafter: make a peer.
        resolve: looks host names up.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        connect_verifier: VerifierFactory = GrpcVerifier,
        connect_drafter: DrafterFactory = GrpcDrafter,
        resolve: Resolver = resolve_host,
    ) -> None:
        if not config.verifiers:
            raise FailedPreconditionError("no verifier is configured; name at least one with --verifiers host:port")
        self._config = config
        self._admission = Admission(config, self._lane_changed, self._give_up)
        self._requests: set[Request] = set()
        self._fleet = Fleet(
            config, self._admission, connect_verifier, connect_drafter, resolve, lambda runner: runner.run(step, self._target.accept)
        )  # fmt: skip
        self._target = Target(config, self._admission, self._fleet, lambda: len(self._requests))
        self._num_arrivals = 0
        self._balancing: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._readiness = ReadinessWatch(config.verifier_wait_s, self._waited_too_long)
        self._idle_event = asyncio.Event()

    @property
    def description(self) -> EngineDescription | None:
        """Clipped capacities and the effective schedule; None until a verifier was reached."""
        return self._admission.description

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        return None if self._target.tokenizer is None else self._target.tokenizer.to_spec()

    @property
    def speculation(self) -> tuple[EffectiveSetting, ...]:
        """The configuration of speculation in effect; empty until a verifier was reached."""
        return self._target.speculation

    def watch_model(self, tell: Callable[[], None]) -> None:
        """Has `tell` called whenever another model has taken the place of the one that was served. No request is live then."""
        self._target.on_change.append(tell)

    @property
    def counters(self) -> Counters:
        return self._admission.counters

    @property
    def metrics(self) -> Metrics:
        return self._admission.telemetry.metrics

    @property
    def calibration_statistics(self) -> tuple[CalibrationStatistics, ...]:
        """How well the scores of drafters are understood, as of the last second; empty without adaptive verification."""
        calibration = self._admission.calibration
        return () if calibration is None else calibration.statistics

    @property
    def lanes(self) -> list[Lane]:
        return self._admission.lanes

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return self._admission.num_waiting

    @property
    def num_parked(self) -> int:
        """Sequences that have no place until their clients read."""
        return len(self._admission.parked)

    @property
    def max_queue(self) -> int:
        """Most of them."""
        return self._config.max_queue

    @property
    def ready(self) -> Readiness:
        """Ready while any lane is, even if others or drafters are missing; the reason names those."""
        if self._is_stopping:
            return Readiness(False, "shutting down")
        reasons = "; ".join(f"lane {lane.index}: {lane.reason}" for lane in self.lanes if not lane.is_ready)
        if not any(lane.is_ready for lane in self.lanes):
            return Readiness(False, reasons if self.lanes else self._fleet.problem)
        return Readiness(True, "; ".join(filter(None, (reasons, *self._fleet.absent_drafters))))

    async def readiness_changed(self) -> None:
        """Returns at the next change of `ready`; any number of tasks may wait."""
        await self._readiness.changed()

    async def start(self) -> None:
        """Begins to connect. Peers that are configured by their own addresses and can be reached now must match; others are waited for.

        Raises:
            FailedPreconditionError: a reachable verifier or drafter does not match the others.
        """
        engine = await self._fleet.start()
        if engine is not None:
            self._target.adopt(engine)
        self._balancing = asyncio.create_task(Balancer(self._admission).run())
        self._lane_changed()

    async def stop(self, grace_s: float) -> None:
        """Takes no more requests, lets the running ones go on for grace_s, fails the rest and disconnects."""
        self._is_stopping = True
        self._lane_changed()
        if self._requests:
            self._idle_event.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._idle_event.wait()
            except TimeoutError:
                logger.warning("%d requests did not end within %.1f s of grace", len(self._requests), grace_s)
        for request in list(self._requests):
            fail_request(
                self._admission, request, UnavailableError(f"the coordinator is shutting down; {progress_of(request)}; send it again elsewhere")
            )
        if self._balancing is not None:
            self._balancing.cancel()
        await self._fleet.stop()
        self._readiness.stop()
        await self._target.stop()
        await asyncio.to_thread(self._admission.telemetry.close)

    def submit(self, message: GenerateRequest, sink: Sink, on_end: Callable[[int], None] | None = None) -> RequestHandle:
        """Admits a request; its output goes to the sink, not before this has returned.

        Args:
            on_end: called when the request has ended in any way, with the number of tokens that it generated.

        Raises:
            InvalidArgumentError, FailedPreconditionError, UnsupportedError: it can never be served.
            ResourceExhaustedError: the queue is full.
            UnavailableError: no verifier is there, or the coordinator is shutting down.
        """
        readiness, engine, tokenizer = self.ready, self.description, self._target.tokenizer
        if not readiness.is_ready or engine is None:
            raise UnavailableError(f"not serving: {readiness.reason}; try again later")
        max_len = check_request(message, engine, has_tokenizer=tokenizer is not None)
        sampling = message.sampling
        self._admission.check_room(sampling.n)
        self._num_arrivals += 1
        noise_key = random.getrandbits(64) if sampling.seed is None else sampling.seed
        is_synthetic = engine.verifier.rejection_sample_method == "synthetic"
        ended = self._request_ended if on_end is None else partial(self._request_ended, on_end=on_end)
        variant = self._admission.variants.pick(message.variant)
        if message.variant:
            message = dataclasses.replace(message, variant="")  # to its peers all are alike
        request = Request(message, sink, self._num_arrivals, noise_key, ended, is_synthetic=is_synthetic, variant=variant)
        for choice in range(sampling.n):
            rules = StopRules(sampling, engine.verifier.eos_token_ids, len(message.prompt_token_ids), engine.max_model_len, tokenizer)
            request.sequences.append(Sequence(request, choice, rules, max_len, engine.num_speculative_tokens))
        if message.timeout_ms is not None:
            request.deadline = asyncio.get_running_loop().call_later(message.timeout_ms / 1000, self._expire, request)
        self._requests.add(request)
        self._admission.telemetry.admitted(request)
        for sequence in request.sequences:
            self._admission.push(sequence)
        for lane in self.lanes:
            lane.wake()
        return RequestHandle(lambda: self._cancel(request))

    @property
    def variants(self) -> Variants:
        """The canary, if one runs."""
        return self._admission.variants

    def set_canary(self, action: CanaryAction, share: float, config: str) -> tuple[VariantStatus, ...]:
        """Starts, changes or ends the canary; see coordinator.canary.set_canary."""
        answer = set_canary(self._admission, action, share, config)
        self._target.describe_speculation()
        return answer

    def check_integrity(self) -> None:
        """Raises AssertionError where the books of queue, lanes and drafters disagree."""
        check_integrity(self._admission, self._requests)

    # --- peers ---

    def _lane_changed(self) -> None:
        has_verifier = any(lane.is_ready for lane in self.lanes)
        self._readiness.look(self.ready, has_verifier=has_verifier)
        if has_verifier:
            for lane in self.lanes:
                lane.wake()

    def _waited_too_long(self) -> None:
        for request in list(self._requests):
            reason = f"no verifier came back within {self._config.verifier_wait_s:g} s ({self.ready.reason}); {progress_of(request)}"
            fail_request(self._admission, request, UnavailableError(f"{reason}; send it again"))

    # --- ends of requests ---

    def _cancel(self, request: Request) -> None:
        for sequence in request.unfinished:
            end_sequence(self._admission, sequence, FinishReason.CANCELLED, error=CancelledError("the request was cancelled"))

    def _expire(self, request: Request) -> None:
        text = f"timeout_ms is {request.message.timeout_ms}, and the request was not done by then: {progress_of(request)}"
        fail_request(self._admission, request, DeadlineExceededError(f"{text}; allow more time or ask for fewer tokens"))

    def _give_up(self, sequence: Sequence, error: SpecwireError) -> None:
        end_sequence(self._admission, sequence, FinishReason.ERROR, error=error)

    def _request_ended(self, request: Request, on_end: Callable[[int], None] | None = None) -> None:
        if request.deadline is not None:
            request.deadline.cancel()
            request.deadline = None
        self._requests.discard(request)
        self._admission.telemetry.request_ended(request)
        if on_end is not None:
            on_end(sum(sequence.num_generated_tokens for sequence in request.sequences))
        if not self._requests:
            self._idle_event.set()
