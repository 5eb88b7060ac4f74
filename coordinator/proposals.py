"""What the drafts of a round were drawn from, for verifiers that test ratios. Pure."""

from specwire.messages import Proposals, VerifyRow
from specwire.proposals import RowProposals, join_proposals

from .slots import Slot


def list_proposals(slots: list[Slot], rows: list[VerifyRow]) -> Proposals | None:
    """Of all drafts of a round, whose rows are those of the slots; None if nothing else could have been drafted."""
    return join_proposals([(row.draft_tokens, _drawn_from(slot, len(row.draft_tokens))) for slot, row in zip(slots, rows, strict=True)])


def _drawn_from(slot: Slot, num_drafts: int) -> RowProposals | None:
    """Of a row's drafts: the leading ones of the last answer, of which some may have been trimmed."""
    if not num_drafts:
        return None
    place = slot.sequence.draft_slot
    assert place is not None, f"slot {slot.index} has {num_drafts} drafts, but its sequence has no drafter"
    return None if place.proposals is None else place.proposals.first(num_drafts)
