"""Two half batches of one lane: the drafters work for one while the verifier runs the other. Which sequences are in which is decided anew for every
step: a step takes those without a row in flight, at most half of all, so that the halves stay even however sequences come and go."""

import logging
from typing import TYPE_CHECKING

from specwire.config import CoordinatorConfig

from .sequence import Sequence

if TYPE_CHECKING:
    from .lane import Lane

logger = logging.getLogger(__name__)

NUM_HALVES = 2


def least_halved(config: CoordinatorConfig, num_rounds: int, label: str) -> int:
    """From how many decoding sequences on a lane's drafting steps take half of them; 0 = never.

    Args:
        num_rounds: that its verifier takes.
        label: what the log calls the lane.
    """
    if config.half_batches_from and num_rounds < NUM_HALVES:
        logger.warning("%s: its verifier takes one round at a time, so there are no half batches", label)
        return 0
    return config.half_batches_from


def most_in_flight(lane: "Lane") -> int:
    """Rounds in flight with which nothing more can be sent. Nothing runs ahead of a drafter that is only late: its drafts would have to wait."""
    if not lane.is_lockstep and not any(link.is_awaited for link in lane.links):
        return lane.max_outstanding_rounds
    return NUM_HALVES if lane.half_batches_from else 1


def half_of(num_decoding: int) -> int:
    """The larger half."""
    return -(-num_decoding // NUM_HALVES)


def take_half(decodes: list[Sequence], num_drafts: list[int], most: int) -> tuple[list[Sequence], list[int]]:
    """The first ones without a row in flight, with their drafts. None is left out twice in a row: where the other half was smaller than half of all,
    the next step has room for those that this one left."""
    taken: list[Sequence] = []
    numbers: list[int] = []
    for sequence, number in zip(decodes, num_drafts, strict=True):
        if len(taken) == most:
            break
        slot = sequence.slot
        assert slot is not None, "a sequence that decodes has a slot"
        if not slot.num_in_flight:
            taken.append(sequence)
            numbers.append(number)
    return taken, numbers
