"""Checks that the books of queue, lanes and drafters agree; for tests, which call it at every step."""

from collections.abc import Iterable

from .admission import Admission
from .lane import Lane
from .link import DraftLink
from .sequence import Request
from .slots import Slot


def check_integrity(admission: Admission, requests: Iterable[Request]) -> None:
    """Raises AssertionError for a sequence in no or two places, mixed-up slots and epochs, or wrong counts of what is in flight."""
    waiting, running = admission.waiting, [sequence for lane in admission.lanes for sequence in lane.running]
    unfinished = [sequence for request in requests for sequence in request.unfinished]
    parked = admission.parked
    assert len(waiting) == admission.num_waiting, f"{len(waiting)} sequences wait, but {admission.num_waiting} are counted"
    assert len({*waiting, *running, *parked}) == len(waiting) + len(running) + len(parked), "a sequence is in two places"
    text = f"{len(unfinished)} sequences live, but {len(waiting)} wait, {len(running)} run and {len(parked)} are parked"
    assert {*waiting, *running, *parked} == {*unfinished}, text
    assert all(sequence.is_paused and not sequence.is_waiting for sequence in parked), "a sequence is parked though its client has read"
    num_open: dict[object, int] = {}
    for lane in admission.lanes:
        _check_lane(lane)
        for link in lane.links:
            _check_link(link)
            num_open[link.drafter] = num_open.get(link.drafter, 0) + len(link.slots)
    for link in admission.lanes[0].links if admission.lanes else []:
        drafter = link.drafter
        assert drafter.num_open == num_open[drafter], f"drafter {drafter.address} counts {drafter.num_open} open slots of {num_open[drafter]}"


def _check_lane(lane: Lane) -> None:
    held = []
    for sequence in lane.running:
        slot = sequence.slot
        assert slot is not None, f"lane {lane.index} runs a sequence without a slot"
        assert slot.lane is lane, f"lane {lane.index} runs a sequence of lane {slot.lane.index}"
        assert not slot.is_closed, f"lane {lane.index} runs a sequence whose slot {slot.index} is closed"
        assert slot.epoch == lane.epochs[slot.index], f"slot {slot.index} has epoch {slot.epoch}, but the last one is {lane.epochs[slot.index]}"
        assert not sequence.is_finished, f"slot {slot.index} holds a sequence that has ended"
        assert sequence.draft_slot is None or sequence not in lane.pins.looking, f"slot {slot.index} has a drafter and looks for one"
        _check_in_flight(lane, slot)
        held.append(slot.index)
    assert not lane.is_ready or sorted([*held, *lane.free]) == list(range(len(lane.epochs))), f"lane {lane.index}: slots {held}, free {lane.free}"
    assert len(lane.in_flight) <= lane.max_outstanding_rounds, f"{len(lane.in_flight)} rounds of {lane.max_outstanding_rounds} in flight"
    strays = [slot for round_ in lane.in_flight for slot in round_.slots if slot.lane is not lane]
    assert not strays, f"lane {lane.index} has rows of lane {strays[0].lane.index} in flight"
    assert all(sequence in lane.running for sequence in lane.pins.looking), f"lane {lane.index}: a sequence that is gone looks for a drafter"


def _check_in_flight(lane: Lane, slot: Slot) -> None:
    rows = [(round_, row) for round_ in lane.in_flight for row, owner in zip(round_.rows, round_.slots, strict=True) if owner is slot]
    assert slot.num_in_flight == len(rows), f"slot {slot.index} counts {slot.num_in_flight} rows in flight of {len(rows)}"
    num_chunk_tokens = sum(row.token_budget for _, row in rows)
    assert slot.num_chunk_tokens == num_chunk_tokens, f"slot {slot.index} counts {slot.num_chunk_tokens} chunk tokens of {num_chunk_tokens}"
    assert not rows or slot.parent_round == rows[-1][0].number, f"slot {slot.index} names parent {slot.parent_round}, not {rows[-1][0].number}"
    num_plain = sum(not row.token_budget and not row.draft_tokens for _, row in rows)
    assert slot.num_ahead == num_plain + slot.is_last_chunk, f"slot {slot.index} is {slot.num_ahead} tokens ahead with {num_plain} plain rows"
    length, max_len = len(slot.sequence.token_ids), slot.sequence.max_len
    assert length + slot.num_ahead <= max_len, f"slot {slot.index} has {length} tokens and {slot.num_ahead} ahead, past {max_len}"
    assert not slot.sequence.is_waiting, f"slot {slot.index} holds a sequence that waits"


def _check_link(link: DraftLink) -> None:
    for index, place in link.slots.items():
        assert place.index == index, f"drafter slot {place.index} is listed as {index}"
        assert place.epoch == link.epochs[index], f"drafter slot {index} has epoch {place.epoch}, but the last one is {link.epochs[index]}"
        assert place.sequence.draft_slot is place, f"drafter slot {index} has lost its sequence"
        assert place.sequence in link.lane.running, f"drafter slot {index} holds a sequence that does not run"
        assert place.num_sent_tokens <= len(place.sequence.token_ids), f"drafter slot {index} knows more tokens than there are"
    assert sorted([*link.slots, *link.free]) == list(range(len(link.epochs))), f"drafter slots {[*link.slots]} and {link.free} overlap"
    assert link.is_connected or not link.slots, f"{len(link.slots)} slots at a drafter that is gone"
