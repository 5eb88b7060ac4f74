"""Where sequences' features are: what verifiers say of it reaches the drafters that need it. The features themselves never come here."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specwire.errors import InternalError
from specwire.messages import FeatureHandle

if TYPE_CHECKING:
    from .draft_slot import DraftSlot
    from .lane import Lane
    from .slots import Round, Slot


class SlotFeatures:
    """What a verifier has said of one life of a slot.

    Attributes:
        first: the first handle, which names the place.
        block_ids: of all handles.
        num_positions: that are there, as of the last one.
    """

    __slots__ = ("block_ids", "first", "num_positions")

    def __init__(self, first: FeatureHandle) -> None:
        self.first = first
        self.block_ids: list[int] = []
        self.num_positions = 0


def note_features(round_: "Round", handles: Iterable[FeatureHandle]) -> None:
    """Takes what the answer to a round says of its slots, and lists it for their drafters.

    Raises:
        InternalError: it speaks of a slot that the round has no row of.
    """
    slots = {(slot.index, slot.epoch): slot for slot in round_.slots}
    for handle in handles:
        slot = slots.get((handle.slot, handle.epoch))
        if slot is None:
            raise InternalError(f"the verifier spoke of features of slot {handle.slot}, which has no row in round {round_.number}")
        features = slot.features
        if features is None or features.first.generation != handle.generation:
            features = slot.features = SlotFeatures(handle)
        features.block_ids += handle.new_block_ids
        features.num_positions = max(features.num_positions, handle.first_position + handle.num_positions)
        sequence = slot.sequence
        if sequence.slot is slot and sequence.draft_slot is not None and sequence.draft_slot.is_open:
            list_features(sequence.draft_slot)


def list_features(place: "DraftSlot") -> None:
    """Its drafter, which knows of it, is told with the next message of what it has not heard yet, if it needs features."""
    if place.link.drafter.needs_features:
        place.link.untold[place] = None


def take_handles(untold: "dict[DraftSlot, None]", live: "dict[int, DraftSlot]", lane: "Lane") -> list[FeatureHandle]:
    """Handles for the drafter of what is listed, as far as its slots are live and their sequences have a verifier; the rest is listed anew with
    what comes next."""
    handles = []
    for place in untold:
        slot = place.sequence.slot
        if live.get(place.index) is place and slot is not None and slot.features is not None and not slot.is_closed:
            handles.append(_handle(place, slot, slot.features, lane))
    untold.clear()
    return handles


def _handle(place: "DraftSlot", slot: "Slot", features: SlotFeatures, lane: "Lane") -> FeatureHandle:
    """What the drafter has not heard yet. Of a sequence that decodes, all committed tokens but the last have features."""
    num_told = place.num_told_blocks
    place.num_told_blocks = len(features.block_ids)
    num_positions = features.num_positions if slot.is_prefilling else len(place.sequence.token_ids) - 1
    first, is_first = features.first, not num_told
    return FeatureHandle(
        session=place.link.session,
        slot=place.index,
        epoch=place.epoch,
        feature_set_hash=first.feature_set_hash,
        source=first.source if is_first else "",
        new_block_ids=features.block_ids[num_told:],
        first_position=0,
        num_positions=num_positions,
        generation=first.generation,
        place=first.place,
        address=(first.address or lane.address) if is_first else "",
        server_name=("" if first.address else lane.server_name) if is_first else "",
    )
