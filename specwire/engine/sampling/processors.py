"""What happens to raw logits before sampling: allowed tokens, logit bias, penalties, bad words, in this order.

Row j of a segment is processed as if its first j drafts had been generated: min_tokens, penalties and bad words count them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specwire.engine.sampling.penalties import penalise
from specwire.engine.sampling.slot import SlotSampling


def process_rows(logits: Tensor, slot: SlotSampling, first_index: int, draft_ids: Sequence[int], allowed_mask: Tensor | None = None) -> None:
    """Process the rows of one segment in place.

    Args:
        logits: [1 + num_drafts, V] float32.
        first_index: absolute index of the token that row 0 samples; the slot has seen all tokens before it.
        allowed_mask: [1 + num_drafts, V] bool, True where a grammar allows the token.
    """
    if allowed_mask is not None:
        logits.masked_fill_(~allowed_mask, -torch.inf)
    if slot.allowed_ids is not None:
        kept = logits[:, slot.allowed_ids]
        logits.fill_(-torch.inf)
        logits[:, slot.allowed_ids] = kept
    if slot.stop_ids is not None:
        logits[: slot.num_below_min_tokens(first_index), slot.stop_ids] = -torch.inf
    if slot.bias_ids is not None:
        logits[:, slot.bias_ids] += slot.bias
    if slot.seen is not None:
        penalise(logits, slot.seen, slot.params, draft_ids)
    if slot.banned_ids is not None:
        logits[:, slot.banned_ids] = -torch.inf
    for row, token_id in _phrase_ends(slot, draft_ids):
        logits[row, token_id] = -torch.inf


def _phrase_ends(slot: SlotSampling, draft_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(row, token id) pairs that would complete a bad word of several tokens. Prompt tokens count as part of a word."""
    if not slot.phrases:
        return []
    history = (*slot.tail, *draft_ids)
    ends = []
    for row in range(1 + len(draft_ids)):
        length = len(slot.tail) + row
        for prefix, last in slot.phrases:
            if len(prefix) <= length and history[length - len(prefix) : length] == prefix:
                ends.append((row, last))
    return ends
