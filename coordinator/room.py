"""Whether a lane has room for one more sequence, and who could make some."""

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .lane import Lane

_SUSPECT_SETBACKS = 2
"""A sequence that lost its verifier so often without a new token may be the reason: it runs alone until it has one."""


def has_room(lane: "Lane", sequence: Sequence) -> bool:
    """Whether a lane has a slot and blocks for a sequence; one that runs nothing takes whatever fits into it at all."""
    if not lane.is_ready or not lane.has_free_slot:
        return False
    return not lane.running or (not _is_suspect(lane, sequence) and _num_missing_blocks(lane, sequence) <= 0)


def find_preemptible(lane: "Lane", sequence: Sequence) -> list[Sequence]:
    """The fewest sequences of a lane whose places would make room for a more important one: the newest of the least important first. None if all
    of them would not be enough. Where blocks are missing, none while the verifier has not told what the last preemption gave."""
    less_important = [other for other in lane.running if other.order[0] > sequence.order[0]]
    if not less_important or not lane.is_ready or _is_suspect(lane, sequence):
        return []
    num_missing = _num_missing_blocks(lane, sequence)
    if num_missing > 0 and lane.next_round - len(lane.in_flight) <= lane.preempted_round:
        return []
    less_important.sort(key=lambda other: other.order, reverse=True)
    for count, other in enumerate(less_important, start=1):
        num_missing -= _num_blocks(len(other.token_ids), lane.block_size) + 1
        if num_missing <= 0 or count == len(lane.running):
            return less_important[:count]
    return []


def _is_suspect(lane: "Lane", sequence: Sequence) -> bool:
    """Whether a sequence may not run beside those of a lane."""
    return sequence.num_setbacks >= _SUSPECT_SETBACKS or any(other.num_setbacks >= _SUSPECT_SETBACKS for other in lane.running)


def _num_missing_blocks(lane: "Lane", sequence: Sequence) -> int:
    """Blocks that a lane would have to free for a sequence. What its prefills will still take is counted as taken, and every running sequence
    may need one more block soon."""
    block_size = lane.block_size
    num_needed = _num_blocks(len(sequence.token_ids) + 1, block_size) + len(lane.running)
    for other in lane.running:
        slot = other.slot
        assert slot is not None, "a running sequence has a slot"
        if slot.is_prefilling:
            num_needed += _num_blocks(slot.num_known_tokens + 1, block_size) - slot.num_computed_tokens // block_size
    return num_needed - lane.num_free_blocks


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
