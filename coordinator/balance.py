"""Evens out what runs where: lanes and drafters that have come late get their share of the sequences that run already."""

import asyncio
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from .admission import Admission
from .room import has_room

if TYPE_CHECKING:
    from .draft_slot import DraftSlot
    from .drafters import Drafter
    from .lane import Lane
    from .link import DraftLink

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LEAST_SHARE = 0.6
"""Of the mean: moving begins where the emptiest has less."""
_NUM_LOOKS = 2
"""Looks in a row that must find it so: an unevenness that ends by itself is not worth a move."""
_ROUNDS_PER_LOOK = 2
"""Bounds the cost of moving: what is computed anew after one look fills about so many rounds."""


class Balancer:
    """Looks once a second and moves some sequences where the load is uneven. A move neither loses nor repeats a token.

    Args:
        admission: has the lanes and the counters.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._lanes = _Watch()
        self._drafters = _Watch()

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """One look at lanes and drafters."""
        if not self._balance_lanes():
            self._balance_drafters()

    def _balance_lanes(self) -> bool:
        """Whether sequences move: they take their load from drafter to drafter themselves."""
        lanes = [lane for lane in self._admission.lanes if lane.is_ready]
        loads = {lane: len(lane.running) for lane in lanes}
        if not self._lanes.is_uneven(list(loads.values())) or any(lane.leaving for lane in lanes):
            return False
        budget, num_leaving = self._budget, 0
        while True:
            source, target = max(lanes, key=loads.__getitem__), min(lanes, key=loads.__getitem__)
            movable = [sequence for sequence in source.running if not sequence.num_setbacks and sequence not in source.leaving]
            sequence = min(movable, key=lambda sequence: len(sequence.token_ids), default=None)
            if sequence is None or loads[source] - loads[target] < 2 or not has_room(target, sequence):
                break
            budget -= len(sequence.token_ids)
            if num_leaving and budget < 0:
                break
            num_leaving += 1
            loads[source] -= 1
            loads[target] += 1
            source.leaving[sequence] = target
            source.wake()
        if num_leaving:
            logger.info("moves %d sequences between lanes, which then run %s", num_leaving, list(loads.values()))
        return num_leaving > 0

    def _balance_drafters(self) -> None:
        drafters = list({link.drafter: None for lane in self._admission.lanes for link in lane.links if link.is_usable})
        if len(drafters) < 2:
            return
        source = max(drafters, key=lambda drafter: drafter.num_open)
        # One that is full, or too small for what runs, has all that it can have; one that is late for some lane has no time for more.
        others = [drafter for drafter in drafters if drafter is not source and not drafter.is_late and any(_pins(source, drafter))]
        if not self._drafters.is_uneven([drafter.num_open for drafter in (source, *others)]):
            return
        budget, num_moved = self._budget, 0
        shares = {lane: lane.pins.shares() for lane in self._admission.lanes}
        while others:
            target = min(others, key=lambda drafter: drafter.num_open)
            pin = _next_pin(source, target, shares) if source.num_open - target.num_open >= 2 else None
            if pin is None:
                break
            place, link = pin
            budget -= len(place.sequence.token_ids)
            if num_moved and budget < 0:
                break
            num_moved += 1
            place.link.close_slot(place)
            link.take(place.sequence)
            link.lane.wake()
            source = max((source, *others), key=lambda drafter: drafter.num_open)
        if num_moved:
            self._admission.counters.num_drafter_moves += num_moved
            logger.info("moved %d sequences between drafters, which now have %s", num_moved, [drafter.num_open for drafter in drafters])

    @property
    def _budget(self) -> int:
        """Tokens to compute anew after one look."""
        return _ROUNDS_PER_LOOK * max((lane.max_num_batched_tokens for lane in self._admission.lanes), default=0)


def _pins(source: "Drafter", target: "Drafter") -> "Iterator[tuple[DraftSlot, DraftLink]]":
    """The sequences of one drafter that another can take, each with the link that takes it."""
    takers = {link.lane: link for link in target.links}
    for link in source.links:
        to = takers.get(link.lane)
        if to is not None:
            yield from ((place, to) for place in link.slots.values() if to.can_take(place.sequence))


def _next_pin(source: "Drafter", target: "Drafter", shares: "dict[Lane, dict[DraftLink, int]]") -> "tuple[DraftSlot, DraftLink] | None":
    """Which goes first: the shortest, if possible of a lane whose own the other drafter is.

    Args:
        shares: what lanes should have of drafters (`Pins.shares`).
    """

    def order(pin: "tuple[DraftSlot, DraftLink]") -> tuple[bool, int, int]:
        place, to = pin
        return not shares[to.lane].get(to), len(place.sequence.token_ids), to.lane.index

    return min(_pins(source, target), key=order, default=None)


def let_go(lane: "Lane") -> None:
    """Moves the sequences that are to leave a lane. Only between its steps: a step's plan names sequences, whose slots must stay the lane's."""
    leaving, lane.leaving = lane.leaving, {}
    for sequence, target in leaving.items():
        if sequence in lane.running and has_room(target, sequence):
            lane.release(sequence)
            lane.telemetry.requeued(sequence, None)
            sequence.queued_ns = time.monotonic_ns()
            target.place(sequence)
            lane.counters.num_moves += 1


class _Watch:
    """Decides when to move: once the emptiest had too little for some looks in a row, and then until it has the mean, rounded down."""

    def __init__(self) -> None:
        self._num_looks = 0

    def is_uneven(self, loads: SequenceOf[int]) -> bool:
        least, mean = min(loads, default=0), sum(loads) / max(1, len(loads))
        if max(loads, default=0) - least < 2 or least >= int(mean):
            self._num_looks = 0
        elif self._num_looks < _NUM_LOOKS:
            self._num_looks = self._num_looks + 1 if least < _LEAST_SHARE * mean else 0
        return self._num_looks >= _NUM_LOOKS
