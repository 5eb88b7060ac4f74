"""Largest logits of each row with ties to the lowest id, which neither `topk` nor a block-wise maximum promises."""

import torch
from torch import Tensor

_BLOCK = 128
_SMALL_BLOCK = 32


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row and the lowest id that has it; a row with a NaN has value NaN.

    Args:
        logits: [R, V].

    Returns:
        values [R], token_ids [R] int64.
    """
    num_rows, size = logits.shape
    if size % _BLOCK != 0:
        return logits.max(dim=1)
    # `amax` is vectorised on CPU and `max` with indices is not: find the first best block, then look into it (4 x faster).
    blocks = logits.unflatten(1, (size // _BLOCK, _BLOCK))  # [R, B, block]
    block = blocks.amax(dim=2).max(dim=1).indices  # [R]
    values, offsets = blocks[torch.arange(num_rows, device=logits.device), block].max(dim=1)
    return values, block * _BLOCK + offsets


def top_ordered(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` best of each row by falling value, equal values by rising id.

    Args:
        logits: [R, V], no NaN. The order among entries that are -inf is unspecified.
        num: cut to V.

    Returns:
        values [R, num], token_ids [R, num] int64.
    """
    size = logits.shape[1]
    num = min(num, size)
    values, token_ids = _topk(logits, min(num + 1, size))  # one more shows a tie across the border
    tied = (values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()
    values, token_ids = values[:, :num], token_ids[:, :num]
    for row in tied.any(dim=1).nonzero().squeeze(1).tolist():
        reach = (logits[row] >= values[row, -1]) & (logits[row] > -torch.inf)
        candidates = reach.nonzero().squeeze(1)  # rising ids
        best, order = logits[row, candidates].sort(descending=True, stable=True)
        best, order = best[:num], order[:num]
        values[row, : len(best)], token_ids[row, : len(best)] = best, candidates[order]
    return values, token_ids


def _topk(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """`logits.topk(num, dim=1)`, about twice as fast on CPU: the best `num` are in the `num` blocks with the best maxima."""
    size = logits.shape[1]
    if size % _SMALL_BLOCK != 0 or num * _SMALL_BLOCK * 4 > size:
        return logits.topk(num, dim=1)
    blocks = logits.unflatten(1, (size // _SMALL_BLOCK, _SMALL_BLOCK))  # [R, B, block]
    chosen = blocks.amax(dim=2).topk(num, dim=1, sorted=False).indices  # [R, num]
    candidates = blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, _SMALL_BLOCK)).flatten(1)  # [R, num * block]
    values, positions = candidates.topk(num, dim=1)
    return values, chosen.gather(1, positions // _SMALL_BLOCK) * _SMALL_BLOCK + positions % _SMALL_BLOCK
