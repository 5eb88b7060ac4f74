"""One lane's stream to one drafter: slots there, what was asked, and which replies may be used."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from specwire.errors import InternalError, SpecwireError, UnavailableError
from specwire.messages import DraftCommit, DraftOpen, DraftResult, DraftRound, DraftRow, Hello, SlotRef

from .asked_round import AskedRound
from .backoff import Backoff
from .countdown import Countdown
from .draft_slot import DraftSlot, Opening, take_opens
from .features import take_handles
from .peers import DrafterFactory, DrafterPeer, DraftStream, answer_in_time, greet
from .replies import take_rows

if TYPE_CHECKING:
    from .drafters import Drafter
    from .lane import Lane
    from .sequence import Sequence

logger = logging.getLogger(__name__)

_LOST_S = 10.0
"""An answer that does not come so long after the drafter seemed to hang will not come at all: the stream starts over."""
_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""


class DraftLink:
    """A stream that reconnects by itself. A drafter that missed its time gets nothing more until it has answered.

    Attributes:
        is_usable: connected, not late and not draining.
        is_awaited: late, but for less than a drafter that hangs: rounds that ran ahead would only keep its drafts waiting.
        is_draining: the drafter is about to stop.
        reason: why it is not connected.
        slots: live slots by index.
        untold: those whose drafter has not heard all of where their features are; of drafters that need them.
        session: of the stream, as its messages say.
        asks: slots whose drafts the next `post` asks for.
        asked: the last round with rows.
        draft_ms: the drafter's work on its last answer; 0 = not known.
    """

    def __init__(self, drafter: "Drafter", lane: "Lane", connect: DrafterFactory, max_message_bytes: int, hello: Hello) -> None:
        self.drafter = drafter
        self.lane = lane
        self.is_connected = False
        self.is_late = False
        self.is_awaited = False
        self.is_draining = False
        self.is_usable = False
        self.slots: dict[int, DraftSlot] = {}
        self.asks: list[DraftSlot] = []
        self._connect_peer = connect
        self._max_message_bytes = max_message_bytes
        self._hello = hello
        self._stream: DraftStream | None = None
        self.session = 0
        self.untold: dict[DraftSlot, None] = {}
        self._round = 0
        self.asked = AskedRound(self._miss, self._give_up)
        self.draft_ms = 0.0
        self._patience = asyncio.timeout(None)
        self._refusal: SpecwireError | None = None
        self.reason = "not connected yet"
        self._closes: list[SlotRef] = []
        self._unopened: dict[DraftSlot, None] = {}
        self.free: list[int] = []
        self.epochs: list[int] = []

    def can_take(self, sequence: "Sequence") -> bool:
        drafter = self.drafter
        has_room = self.is_usable and drafter.num_open < drafter.max_num_seqs and len(sequence.token_ids) < drafter.window
        return has_room and self.lane.admission.variants.may_draft(sequence, drafter)

    def take(self, sequence: "Sequence", num_failures: int = 0) -> None:
        """Gives a sequence a slot; its Open goes with the next message."""
        if self.free:
            index = self.free.pop()
        else:
            index = len(self.epochs)
            self.epochs.append(0)
        self.epochs[index] += 1
        place = DraftSlot(self, index, self.epochs[index], sequence)
        place.num_failures = num_failures
        self.slots[index] = sequence.draft_slot = place
        self._unopened[place] = None
        self.drafter.num_open += 1

    def close_slot(self, place: DraftSlot, *, makes_room: bool = True) -> None:
        """Ends a slot. makes_room: another sequence may find a place at the drafter now."""
        assert self.slots.get(place.index) is place, f"drafter slot {place.index} is closed, but epoch {place.epoch} is not its live one"
        del self.slots[place.index]
        place.sequence.draft_slot = None
        self.free.append(place.index)
        self.drafter.num_open -= 1
        if place.is_open:
            self._closes.append(SlotRef(place.index, place.epoch))
        self._unopened.pop(place, None)
        self.lane.pins.may_pin = self.lane.pins.may_pin or makes_room

    @property
    def has_unopened(self) -> bool:
        """There are slots that the drafter has not been told of."""
        return bool(self._unopened)

    def has_mail(self, opening: Opening) -> bool:
        """Whether `post` would send something even if nothing is asked."""
        return self.is_usable and bool(self._closes or (opening.most_open and (self._num_opens(opening) or self.untold)))

    def _num_opens(self, opening: Opening) -> int:
        num_unopened = len(self._unopened)
        return min(num_unopened, max(0, opening.most_open - (len(self.slots) - num_unopened)))

    def post(self, countdown: Countdown, opening: Opening) -> None:
        """Sends closes, opens, what the asked sequences have got since, and the asks; counts an answer that is due."""
        asks, self.asks = self.asks, []
        if not self.is_usable:
            return
        opens: list[DraftOpen] = []
        if self._unopened and (num_opens := self._num_opens(opening)):
            opens = take_opens(self._unopened, num_opens, self.lane.max_num_batched_tokens)
        commits: list[DraftCommit] = [place.take_commit() for place in opening.in_step if place.link is self and not place.is_in_step]
        rows: list[DraftRow] = []
        most_drafts = 0
        round_ = self._round = self._round + 1
        for place in asks:
            if not place.is_open:
                continue
            base_len, num_asked = len(place.sequence.token_ids), place.num_asked
            if place.num_sent_tokens < base_len:
                commits.append(place.take_commit())
            rows.append(_new(DraftRow, (place.index, place.epoch, base_len, num_asked, place.parent_round)))
            place.parent_round = round_
            if num_asked > most_drafts:
                most_drafts = num_asked
        features = take_handles(self.untold, self.slots, self.lane) if self.untold else []
        if not (rows or opens or commits or features or self._closes):
            return
        closes, self._closes = self._closes, []
        assert self._stream is not None, "a usable link has a stream"
        traceparents = self.lane.telemetry.asking(self, round_) if rows else ()
        self._stream.send(
            DraftRound(
                self.session, self.lane.index, round_, closes, opens, commits, features, rows, traceparents=traceparents, sent_ns=time.time_ns()
            )
        )  # fmt: skip
        if rows:
            self.asked.begin(round_, most_drafts, len(rows), self.drafter.wait_s(most_drafts, len(rows)), countdown)

    async def run(self) -> None:
        """Connects, and connects again whenever the stream ends; cancelled from outside."""
        backoff = Backoff()
        peer = self._connect_peer(self.drafter.address, self._max_message_bytes, self.drafter.server_name)
        try:
            while True:
                try:
                    await self._connect(peer)
                    async with asyncio.timeout(None) as self._patience:
                        while not self.is_draining or self.asked.number:
                            self._on_reply(await self._receive())
                            backoff.reset()
                    await self.asked.let_step_go_on()
                    self._hand_over()
                except SpecwireError as error:
                    self._lose(error)
                except TimeoutError:
                    self._lose(self._refusal or UnavailableError("it still does not answer what it was asked for; the stream starts over"))
                except Exception as error:
                    logger.exception("drafter %s: a fault in its link", self.drafter.address)
                    self._lose(InternalError(f"{type(error).__name__}: {error}"))
                await backoff.wait()
        finally:
            self.asked.release()
            if self._stream is not None:
                self._stream.close()
            await peer.close()

    async def _connect(self, peer: DrafterPeer) -> None:
        description = await answer_in_time(peer.describe(), "Describe")
        engine = self.lane.admission.description
        assert engine is not None, "drafters are connected once a verifier is known"
        try:
            self.drafter.accept(engine, description, [link.drafter for link in self.lane.links])
        except SpecwireError:
            self.lane.counters.num_drafter_refusals += 1
            raise
        self.drafter.links.add(self)
        self._stream = peer.open_stream()
        self.session += 1
        await greet(self._stream, DraftRound(self.session, self.lane.index, 0, hello=self._hello), description.instance_id)
        self.is_connected = self.is_usable = True
        # It may be able to do what others could not, or be the first one at all.
        for sequence in self.lane.running:
            if sequence.max_drafts and sequence.draft_slot is None:
                self.lane.pins.look(sequence)
        self._begin()
        self.lane.admission.lane_changed()
        logger.info("lane %d: drafter %s is there", self.lane.index, self.drafter.address)

    def refuse(self, error: SpecwireError) -> None:
        """Ends a stream to a drafter that does not match any more."""
        self._refusal, self.is_usable = error, False
        if not self.is_draining:
            self._patience.reschedule(asyncio.get_running_loop().time())

    async def _receive(self) -> DraftResult:
        assert self._stream is not None, "a connected link has a stream"
        return await self._stream.receive()

    def _lose(self, error: SpecwireError) -> None:
        """Everything at the drafter is gone: its sequences look for another one, or decode plainly."""
        lane = self.lane
        if self.is_connected:
            lane.counters.num_drafter_losses += 1
            lane.counters.fallbacks["drafter_lost"] += len(self.slots)
        if self.is_connected or str(error) != self.reason:
            self.reason = str(error)
            lane.log.warning(f"drafter {self.drafter.address}", "lane %d: no drafts from %s: %s", lane.index, self.drafter.address, error)
        self._leave()

    def _hand_over(self) -> None:
        """The drafter is about to stop and owes no answer: its sequences look for another one."""
        self.lane.counters.num_drafter_handovers += len(self.slots)
        self.reason = "it is about to stop"
        logger.info("lane %d: drafter %s stops; its %d sequences look for another one", self.lane.index, self.drafter.address, len(self.slots))
        self._leave()

    def _leave(self) -> None:
        lane = self.lane
        self.drafter.links.discard(self)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.is_connected = self.is_usable = self.is_late = self.is_awaited = self.is_draining = False
        self._refusal = None
        for place in list(self.slots.values()):
            self.close_slot(place)
            lane.pins.look(place.sequence)
        self._closes.clear()
        self._unopened.clear()
        self.untold.clear()
        self.asks.clear()
        self.asked.end()
        lane.admission.lane_changed()
        lane.wake()

    def _miss(self) -> None:
        lane = self.lane
        self.is_late, self.is_awaited, self.is_usable = True, True, False
        lane.counters.num_drafter_timeouts += 1
        lane.counters.fallbacks["drafter_timeout"] += self.asked.num_sequences
        lane.log.warning(
            f"late {self.drafter.address}", "lane %d: drafter %s did not answer within %.1f ms; its %d sequences go on without drafts",
            lane.index, self.drafter.address, 1000 * self.asked.wait_s, self.asked.num_sequences,
        )  # fmt: skip
        lane.telemetry.draft_missed(self)

    def _begin(self) -> None:
        """It can be asked, for the first time or again: who looks for a drafter may find one, and so may those whose drafter seems to hang."""
        self.lane.pins.may_pin = True
        for link in self.lane.links:
            if link.is_late and not link.is_awaited:
                link._let_go()
        self.lane.wake()

    def _let_go(self) -> None:
        """Its sequences look for another drafter."""
        for place in list(self.slots.values()):
            self.close_slot(place)
            self.lane.pins.look(place.sequence)

    def _give_up(self) -> None:
        """It seems to hang: its sequences move to another drafter, now or once there is one."""
        self.is_awaited = False
        if any(link.is_usable for link in self.lane.links):
            self._let_go()
            self.lane.wake()
        self._patience.reschedule(asyncio.get_running_loop().time() + _LOST_S)

    def _on_reply(self, result: DraftResult) -> None:
        counters = self.lane.counters
        if self._refusal is not None:
            raise self._refusal
        if result.draining and result.round:
            raise InternalError(f"it says that it is about to stop in the answer to round {result.round}, not in a message of its own")
        if result.draining:
            self.is_draining, self.is_usable = True, False
            return
        if result.round and result.round != self.asked.number:
            counters.num_garbage_drafts += max(1, len(result.rows))
            if self.asked.number:
                # One round at a time is asked: the answer to it will not come any more.
                raise InternalError(f"round {result.round} was answered, but round {self.asked.number} was asked; the stream starts over")
            return
        reply_s = (time.monotonic_ns() - self.asked.sent_ns) / 1e9
        if result.round:
            self.draft_ms = max(0, result.timing.finished_ns - result.timing.started_ns) / 1e6
            self.lane.telemetry.drafted(self, result)
        take_rows(self, result.rows, is_asked=result.round > 0, proposals=result.proposals)
        if result.round:
            asked = self.asked
            if asked.says_speed(reply_s):
                self.drafter.times.record(asked.num_draft_tokens, asked.num_sequences, reply_s, 2 * asked.wait_s)
            asked.end()
            if self.is_late:
                self._patience.reschedule(None)
                self.is_late, self.is_awaited, self.is_usable = False, False, not self.is_draining
                self._begin()
