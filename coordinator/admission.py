"""Who waits and who gets in: the queue, the lanes' room, and what is refused outright."""

import heapq
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from specwire.config import CoordinatorConfig
from specwire.degraded_log import DegradedLog
from specwire.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, SpecwireError
from specwire.messages import GenerateRequest
from specwire.policy.capacity import EngineDescription
from specwire.speculative_acceptance import check_rates
from specwire.token_ids import check_token_ids

from .calibration import Calibration
from .counters import Counters
from .room import find_preemptible, has_room
from .sequence import Request, Sequence
from .spans import open_spans
from .telemetry import Telemetry
from .variants import Variants, check_variant

if TYPE_CHECKING:
    from .lane import Lane

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_LENGTH = 256
MAX_SETBACKS = 5
"""Attempts without a new token, after which a sequence is given up."""
RETRY_AFTER_MS = 1000
"""When to come back where other requests must end first: about what a few tens of tokens take, though nobody knows."""
_MOST_ENDED = 64
"""Sequences that ended in the queue and are still in it, beyond as many as wait."""
_FIXED_BYTES = 512
"""Scalars and frames of an Open."""


class Admission:
    """The one queue of all lanes, by priority and then arrival; a preempted sequence comes back to its old place in it. One whose client
    does not read gives its place to whoever waits for one, and comes back to the queue when its client has read. A less important one gives
    its place to a more important one.

    Args:
        config: bounds the queue.
        lane_changed: called when a lane has become ready or not.
        give_up: ends a sequence with an error.

    Attributes:
        parked: sequences that neither wait nor run until their clients have read.
        calibration: what lanes know of drafters' scores; None without adaptive verification.
        variants: configurations of speculation that requests run with.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        lane_changed: Callable[[], None],
        give_up: Callable[[Sequence, SpecwireError], None],
    ) -> None:
        self.config = config
        self.lane_changed = lane_changed
        self.description: EngineDescription | None = None
        self.calibration: Calibration | None = None
        self.variants = Variants(config.speculative_config, config.schedule_hysteresis_steps)
        self.lanes: list[Lane] = []
        self.counters = Counters()
        self.log = DegradedLog(logger)
        self.telemetry = Telemetry(open_spans(config, self.counters))
        self.num_waiting = 0
        self.parked: dict[Sequence, None] = {}
        self._give_up = give_up
        self._heap: list[tuple[tuple[int, int, int], int, Sequence]] = []
        self._num_pushed = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, in no order."""
        return [sequence for _, _, sequence in self._heap if sequence.is_waiting]

    def check_room(self, num_choices: int) -> None:
        """Raise ResourceExhaustedError if the queue has no room for all choices of a request."""
        limit = self.config.max_queue
        if num_choices > limit:
            text = f"n is {num_choices}, but max_queue is {limit}, and every choice may have to wait"
            raise ResourceExhaustedError(f"{text}; ask for fewer choices, or raise max_queue")
        if self.num_waiting + num_choices > limit:
            raise ResourceExhaustedError(
                f"{self.num_waiting} sequences wait already, and max_queue is {limit}; try again later or raise max_queue",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def push(self, sequence: Sequence) -> None:
        assert not sequence.is_waiting, "a sequence waits once"
        assert not sequence.is_finished, "a sequence that has ended does not wait"
        sequence.is_waiting = True
        sequence.queued_ns = time.monotonic_ns()
        self.num_waiting += 1
        self._num_pushed += 1
        heapq.heappush(self._heap, (sequence.order, self._num_pushed, sequence))

    def requeue(self, sequence: Sequence, setback: SpecwireError | None = None) -> None:
        """A sequence that lost its place comes back; one that does so again and again without a new token is given up."""
        if setback is not None:
            sequence.num_setbacks += 1
            if sequence.num_setbacks > MAX_SETBACKS:
                self._give_up(sequence, setback)
                return
        self.telemetry.requeued(sequence, setback)
        if sequence.is_paused:
            sequence.queued_ns = time.monotonic_ns()
            self.parked[sequence] = None
        else:
            self.push(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence that has ended out of the queue, or from among those that are parked."""
        if sequence in self.parked:
            del self.parked[sequence]
        elif sequence.is_waiting:
            sequence.is_waiting = False
            self.num_waiting -= 1
            # Those behind one that waits for long would stay, prompt and all.
            if len(self._heap) > 2 * self.num_waiting + _MOST_ENDED:
                self._heap = [entry for entry in self._heap if entry[2].is_waiting]
                heapq.heapify(self._heap)

    def resume(self, request: Request) -> None:
        """The request's client has read enough for its sequences to go on."""
        for sequence in request.unfinished:
            sequence.is_paused = False
            if sequence in self.parked:
                del self.parked[sequence]
                self.push(sequence)
                for lane in self.lanes:
                    lane.wake()
            elif sequence.slot is not None:
                sequence.slot.lane.wake()

    def park(self, sequence: Sequence) -> None:
        """Takes the place of a paused sequence away."""
        assert sequence.is_paused, "only a sequence whose client does not read is parked"
        slot = sequence.slot
        assert slot is not None, "a running sequence has a slot"
        self.counters.num_pauses += 1
        self.log.warning("parked", "request %s gives its place to others: its client does not read", sequence.request.label)
        slot.lane.release(sequence)
        self.requeue(sequence)

    def preempt(self, sequence: Sequence, reason: str) -> None:
        """Takes the place of a running sequence away; it goes on exactly once it has one again. Only between two steps of its lane."""
        slot = sequence.slot
        assert slot is not None, "a running sequence has a slot"
        lane = slot.lane
        self.counters.num_preemptions += 1
        sequence.num_preemptions += 1
        lane.preempted_round = lane.next_round
        text = "lane %d preempts 1 of %d sequences, of request %s: %s"
        self.log.warning("preemption", text, lane.index, len(lane.running), sequence.request.label, reason)
        lane.release(sequence)
        self.requeue(sequence)

    def fill(self, planning: "Lane") -> None:
        """Places waiting sequences while a lane has room for the first of them, or sequences whose clients do not read, or less important ones,
        can make some.

        Args:
            planning: the lane whose step begins: the only one whose sequences may be preempted, since those of others may be in a plan.
        """
        has_made_room = False
        while self._heap:
            sequence = self._heap[0][2]
            if not sequence.is_waiting:
                heapq.heappop(self._heap)
                continue
            if sequence.is_paused:  # by a round that was under way when it lost its place
                self._pop(sequence)
                self.parked[sequence] = None
                continue
            lanes = [lane for lane in self.lanes if has_room(lane, sequence)]
            if lanes:
                self._pop(sequence)
                min(lanes, key=lambda lane: (len(lane.running), -lane.num_free_blocks)).place(sequence)
                has_made_room = False
            else:
                # Where blocks are what is missing, the verifier's next answer says how many there are.
                if has_made_room:
                    return
                paused = [other for lane in self.lanes if lane.is_ready for other in lane.running if other.is_paused]
                less_important = [] if paused else find_preemptible(planning, sequence)
                if paused:
                    self.park(max(paused, key=lambda other: other.order))
                for other in less_important:
                    self.preempt(other, f"a request of priority {sequence.order[0]} waits")
                if not paused and not less_important:
                    return
                has_made_room = True

    def _pop(self, first: Sequence) -> None:
        first.is_waiting = False
        self.num_waiting -= 1
        heapq.heappop(self._heap)


def check_request(request: GenerateRequest, engine: EngineDescription, *, has_tokenizer: bool) -> int:
    """The most tokens that a choice may have, prompt included.

    Raises:
        InvalidArgumentError, FailedPreconditionError, UnsupportedError, ResourceExhaustedError: the request can never be served; the message
            has the numbers.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    num_prompt, limit = len(prompt), engine.max_model_len
    if not prompt:
        raise InvalidArgumentError("prompt_token_ids is empty; send at least one token")
    # Before its ids are looked at: there may be millions of them.
    if num_prompt >= limit:
        raise InvalidArgumentError(
            f"the prompt has {num_prompt} tokens, but a sequence may have {limit}, output included, so no token could follow; shorten it"
        )
    check_token_ids(prompt, engine.vocab_size, "prompt_token_ids")
    num_wanted = limit - num_prompt if sampling.max_tokens is None else sampling.max_tokens
    if num_prompt + num_wanted > limit:
        raise InvalidArgumentError(
            f"the prompt has {num_prompt} tokens and max_tokens is {num_wanted}, together {num_prompt + num_wanted}, but a sequence may have "
            f"{limit}; shorten the prompt, or set max_tokens to {limit - num_prompt} or less"
        )
    if len(request.request_id) > MAX_REQUEST_ID_LENGTH:
        text = f"request_id has {len(request.request_id)} characters, but is a label for logs and traces"
        raise InvalidArgumentError(f"{text} and may have {MAX_REQUEST_ID_LENGTH}; shorten it")
    num_bytes = _parameter_bytes(request)
    if num_bytes > engine.max_parameter_bytes:
        raise ResourceExhaustedError(
            f"the request's parameters (stop strings, id lists, biases, labels) take {num_bytes} bytes, but may take {engine.max_parameter_bytes}, "
            "so that a round fits into a message; send fewer, or raise max_message_mb on all services"
        )
    sampling.check_vocab(engine.vocab_size)
    sampling.check_samplable(engine.vocab_size, engine.verifier.eos_token_ids)
    if sampling.stop and not has_tokenizer:
        raise FailedPreconditionError("stop strings need a tokenizer, but the verifier serves none; use stop_token_ids")
    check_variant(request.variant)
    if request.synthetic_acceptance_rates:
        if engine.verifier.rejection_sample_method != "synthetic":
            raise FailedPreconditionError(
                "synthetic_acceptance_rates were sent, but the verifier's rejection_sample_method is "
                f"{engine.verifier.rejection_sample_method}; leave them out, or start it with synthetic"
            )
        check_rates(request.synthetic_acceptance_rates, engine.verifier.max_num_draft_tokens)
    return num_prompt + num_wanted


def _parameter_bytes(request: GenerateRequest) -> int:
    """About how long an Open is apart from its token ids, never less."""
    sampling = request.sampling
    num_ids = (
        len(sampling.stop_token_ids) + len(sampling.allowed_token_ids or ()) + 2 * len(sampling.logit_bias) + len(request.synthetic_acceptance_rates)
    )
    num_ids += sum(3 + len(word) for word in sampling.bad_words_token_ids)
    texts = [*sampling.stop, request.request_id, request.variant]
    return _FIXED_BYTES + 4 * num_ids + len(request.tenant_cache_key) + sum(8 + 4 * len(text) for text in texts)
