"""What rounds that wait will take."""

from collections.abc import Iterable, Sequence

from specwire.engine.block_manager import BlockManager
from specwire.messages import SlotRef, VerifyRound

from .slots import Slot


def promised_blocks(queued: Sequence[VerifyRound], slots: Iterable[Slot], blocks: BlockManager) -> int:
    """Most blocks that these rounds, received but not launched, can still take from the free ones.

    Args:
        slots: the open ones, as launched rounds leave them.
        blocks: theirs.
    """
    known = {SlotRef(slot.slot, slot.epoch): (slot.num_launched_tokens, slot.num_opened_tokens) for slot in slots if not slot.error}
    num_held = {ref: len(blocks.block_table(ref.slot)) for ref in known}
    num_needed: dict[SlotRef, int] = {}
    for request in queued:
        for message in request.opens:
            ref = SlotRef(message.slot, message.epoch)
            known[ref], num_held[ref] = (0, len(message.token_ids)), 0
        for row in request.rows:
            ref = SlotRef(row.slot, row.epoch)
            if ref in known:
                num_computed, num_opened = known[ref]
                num_prefilled = min(num_needed.get(ref, num_computed) + row.token_budget, num_opened)
                num_needed[ref] = num_prefilled if row.token_budget else row.base_len + len(row.draft_tokens)
    return sum(max(0, -(-num_tokens // blocks.block_size) - num_held[ref]) for ref, num_tokens in num_needed.items())
