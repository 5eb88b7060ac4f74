"""A lane: one verifier replica with its slots, its running sequences and its rounds in flight."""

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from specwire.degraded_log import DegradedLog
from specwire.errors import FailedPreconditionError, InternalError, SpecwireError, UnavailableError
from specwire.messages import ServiceDescription, SlotRef, VerifyCost, VerifyResult, VerifyRound, VerifyRow, Welcome
from specwire.policy.cost import verify_ms
from specwire.policy.schedule import SteadySchedule

from .adaptive import LanePolicy
from .answer_watch import AnswerWatch
from .chunks import ChunkLimit
from .countdown import Countdown
from .counters import Counters
from .draft_slot import OPEN_NONE
from .halves import least_halved
from .inbox import Inbox
from .limits import check_instance
from .link import DraftLink
from .peers import VerifyStream
from .pins import Pins
from .proposals import list_proposals
from .sequence import Sequence
from .slots import Round, Slot

if TYPE_CHECKING:
    from .admission import Admission
    from .plan import Plan
    from .telemetry import Telemetry
    from .variants import Variant

logger = logging.getLogger(__name__)


class Lane:
    """What the step works on. Connected and stepped by its LaneRunner.

    Attributes:
        is_ready: connected, and takes rounds; reason: why not.
        is_draining: connected, but the verifier is about to stop: what is in flight is still answered.
        instance_id: of the verifier that it is connected to, or about to be; empty without one.
        described: the verifier that was there last, refused or not; None before the first.
        running: its sequences in the order in which they were placed.
        in_flight: rounds that are not answered.
        is_lockstep: the last round carried drafts, so that nothing can follow it before its answer, or only the other half batch.
        half_batches_from: see `least_halved`.
        tests_ratio: the verifier wants to know what drafts were drawn from.
        num_free_blocks: as of the last answer, without those promised to rounds in flight.
        preempted_round: rounds before this one were sent before the last preemption took effect.
        pins: its sequences that look for a drafter.
        policy: of adaptive verification; None without it.
        canary: the canary that runs, and its schedule here.
        is_canary_adaptive: its rows have adaptive verification and the others have not (True), or the other way round; None: all alike.
        leaving: sequences that go to another lane between two steps.
        free, epochs: unused slots, and the last epoch of every slot.
    """

    def __init__(self, index: int, address: str, admission: "Admission", server_name: str = "") -> None:
        self.index = index
        self.address = address
        self.server_name = server_name
        self.admission = admission
        self.links: list[DraftLink] = []
        self.pins = Pins(self)
        self.is_ready = False
        self.is_draining = False
        self.instance_id = ""
        self.described: ServiceDescription | None = None
        self.reason = "not connected yet"
        self.running: dict[Sequence, None] = {}
        self.in_flight: deque[Round] = deque()
        self.is_lockstep = False
        self.max_outstanding_rounds = 1
        self.half_batches_from = 0
        self.num_free_blocks = 0
        self.preempted_round = 0
        self.next_round = 1
        self.closes: list[SlotRef] = []
        self.max_num_batched_tokens = 0
        self.schedule = SteadySchedule(())
        self.canary: tuple[Variant, SteadySchedule] | None = None
        self.is_canary_adaptive: bool | None = None
        self.policy: LanePolicy | None = None
        self.num_speculative_tokens = self.vocab_size = 0
        self.tests_ratio = False
        self.block_size = 1
        self.num_blocks = 0
        self.verify_cost = VerifyCost()
        self.chunk_limit = ChunkLimit(0, VerifyCost(), 1, "")
        self.eos_token_ids: tuple[int, ...] = ()
        self._stream: VerifyStream | None = None
        self._session = 0
        self._inbox = Inbox(self.wake, self._drain)
        self._watch = AnswerWatch(admission.config.verifier_timeout_s, self.in_flight, self._give_up)
        self._event = asyncio.Event()
        self.free: list[int] = []
        self.epochs: list[int] = []
        self.leaving: dict[Sequence, Lane] = {}

    @property
    def counters(self) -> Counters:
        return self.admission.counters

    @property
    def telemetry(self) -> "Telemetry":
        return self.admission.telemetry

    @property
    def log(self) -> DegradedLog:
        return self.admission.log

    @property
    def is_connected(self) -> bool:
        return self.is_ready or self.is_draining

    @property
    def has_free_slot(self) -> bool:
        return bool(self.free)

    # --- sequences ---

    def place(self, sequence: Sequence) -> None:
        """Gives a sequence a slot; it is opened with its first row."""
        index = self.free.pop()
        self.epochs[index] += 1
        sequence.slot = Slot(self, index, self.epochs[index], sequence)
        self.running[sequence] = None
        sequence.placed_ns = time.monotonic_ns()
        self.telemetry.placed(sequence)
        if sequence.max_drafts and self.links:
            self.pins.look(sequence)
        self.wake()

    def release(self, sequence: Sequence) -> None:
        """Closes a sequence's slots here and at its drafter."""
        slot = sequence.slot
        assert slot is not None, f"lane {self.index} releases a sequence without a slot"
        assert slot.lane is self, f"lane {self.index} releases slot {slot.index} of lane {slot.lane.index}"
        assert not slot.is_closed, f"lane {self.index} releases slot {slot.index} twice"
        slot.is_closed = True
        self.free.append(slot.index)
        if slot.is_open:
            self.closes.append(SlotRef(slot.index, slot.epoch))
        del self.running[sequence]
        self.pins.forget(sequence)
        if sequence.draft_slot is not None:
            sequence.draft_slot.link.close_slot(sequence.draft_slot)
        self.wake()

    # --- rounds ---

    def launch(self, opened: list[Slot], rows: list[VerifyRow], slots: list[Slot], plan: "Plan") -> None:
        """Sends a round that opens these slots, and has these rows of `slots`; rows are numbered `next_round`. Raises what the stream ended with."""
        self._inbox.check()
        assert self._stream is not None, "a lane that steps has a stream"
        closes, self.closes = self.closes, []
        opens = [slot.open(self.eos_token_ids) for slot in opened]
        proposals = list_proposals(slots, rows) if self.tests_ratio and plan.is_drafting else None
        traceparents = self.telemetry.launching(self, slots, rows, plan)
        round_ = VerifyRound(
            self._session, self.index, self.next_round, closes, opens, rows, proposals=proposals, traceparents=traceparents, sent_ns=time.time_ns()
        )
        self._stream.send(round_)
        plan.times.sent_ns = time.monotonic_ns()
        self.in_flight.append(Round(self.next_round, opened, rows, slots, plan))
        self.next_round += 1
        self.counters.num_rounds += 1
        self.counters.num_rows += len(rows)

    async def something_new(self) -> None:
        """Returns once an answer, a sequence or a drafter has come, or a sequence has gone. Raises what the stream ended with."""
        self._inbox.check()
        if not self._inbox.answers:
            await self._event.wait()
        self._event.clear()

    def take_answers(self) -> list[tuple[Round, VerifyResult]]:
        """Answers in the order of their rounds."""
        taken = []
        while self._inbox.answers:
            answered_ns, result = self._inbox.answers.popleft()
            if not self.in_flight:
                raise InternalError(f"the verifier answered round {result.round}, but none was in flight")
            round_ = self.in_flight.popleft()
            round_.check(result, self.vocab_size)
            round_.plan.times.answered_ns = answered_ns
            self._watch.answered(round_.plan.times.sent_ns, answered_ns)
            self.num_free_blocks = result.free_blocks - result.promised_blocks
            taken.append((round_, result))
        return taken

    def wake(self) -> None:
        self._event.set()

    # --- connection ---

    def expect(self, verifier: ServiceDescription) -> None:
        """It is about to be connected to this one. Raises FailedPreconditionError if that is another lane's, too."""
        check_instance(verifier.instance_id, (lane for lane in self.admission.lanes if lane is not self))
        self.instance_id, self.described = verifier.instance_id, verifier

    def begin(self, session: int, stream: VerifyStream, description: ServiceDescription, welcome: Welcome, max_outstanding_rounds: int) -> None:
        """Takes rounds from now on, over a stream whose welcome was taken; with an accepted verifier, which sets what a round may hold.

        Args:
            max_outstanding_rounds: what both allow.
        """
        engine, config, label = self.admission.description, self.admission.config, f"lane {self.index}"
        assert engine is not None, "an accepted verifier gives the engine its description"
        self._session, self._stream = session, stream
        self.max_num_batched_tokens = engine.max_num_batched_tokens
        self.admission.variants.equip(self, engine.schedule)
        self.num_speculative_tokens, self.vocab_size = engine.num_speculative_tokens, engine.vocab_size
        self.block_size = description.block_size or 1
        self.num_blocks, self.verify_cost = description.num_blocks, description.verify_cost
        self.tests_ratio = description.rejection_sample_method == "probabilistic"
        self.chunk_limit = ChunkLimit(config.max_decode_gap_ms, self.verify_cost, self.block_size, f"{label}: its verifier")
        self.eos_token_ids = description.eos_token_ids
        self.max_outstanding_rounds = max_outstanding_rounds
        self.half_batches_from = least_halved(config, max_outstanding_rounds, label)
        self.num_free_blocks = welcome.free_blocks
        self.policy = None
        self.use_policy()
        self.epochs = [0] * engine.max_num_seqs
        self.free = list(reversed(range(engine.max_num_seqs)))
        self.next_round, self.preempted_round, self.is_lockstep = 1, 0, False
        self._inbox.open(stream)
        self._watch.start(verify_ms(self.verify_cost, self.max_num_batched_tokens, engine.max_num_seqs, 0, longest_row=self.max_num_batched_tokens))
        self.is_ready, self.reason = True, ""
        logger.info("lane %d: verifier %s is there", self.index, self.address)
        self.admission.lane_changed()

    def use_policy(self) -> None:
        """Begins or ends adaptive verification, as the configurations of now have it. What was learned of the steps of another process need not hold
        for this one; what scores are worth is known by all lanes."""
        calibration = self.admission.calibration
        if calibration is None or not self.admission.variants.is_adaptive:
            self.policy = None
        elif self.policy is None:
            config, label = self.admission.config, f"lane {self.index}"
            self.policy = LanePolicy(config, calibration, self.verify_cost, self.num_speculative_tokens, self.max_outstanding_rounds, label)

    def _drain(self) -> None:
        """The verifier is about to stop: no further rounds."""
        self.is_ready, self.is_draining = False, True
        self.reason = f"verifier {self.address} is about to stop"
        self.admission.lane_changed()

    def _give_up(self, error: UnavailableError) -> None:
        """The verifier hangs: the step finds that its stream has ended."""
        self.counters.num_verifier_timeouts += 1
        self._inbox.fail(error)

    def hand_over(self) -> None:
        """The verifier is about to stop and owes no answer: its sequences go on elsewhere."""
        self.counters.num_handovers += len(self.running)
        logger.info("lane %d: verifier %s stops; %d sequences go on elsewhere", self.index, self.address, len(self.running))
        self._leave()

    def lose(self, error: SpecwireError) -> None:
        """The verifier is gone, or has never been there: its sequences wait for another lane, or for this one."""
        was, self.reason = self.reason, f"verifier {self.address}: {error}"
        if self.is_connected:
            self.counters.num_verifier_losses += 1
            self.log.warning(f"lost {self.index}", "lane %d lost %s; %d sequences wait for a verifier", self.index, self.reason, len(self.running))
        else:
            self.counters.num_verifier_refusals += isinstance(error, FailedPreconditionError)
            if self.reason != was:
                self.log.warning(f"without {self.index}", "lane %d can't use %s", self.index, self.reason)
        self._leave(error)

    def _leave(self, setback: SpecwireError | None = None) -> None:
        """Hangs up; what runs here waits for a lane."""
        self.is_ready = self.is_draining = False
        self.instance_id = ""
        self.hang_up()
        for sequence in list(self.running):
            self.release(sequence)
            self.admission.requeue(sequence, setback)
        self.closes.clear()
        self.leaving.clear()
        for link in self.links:
            link.post(Countdown(), OPEN_NONE)
        self.admission.lane_changed()

    def hang_up(self) -> None:
        """Ends the stream, if there is one."""
        self._inbox.close()
        self._watch.stop()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.in_flight.clear()
