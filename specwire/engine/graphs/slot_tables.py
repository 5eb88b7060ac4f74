"""A slot's rows of the tables over the vocabulary, written when it opens, in the order of the stream and without waiting for the device."""

import torch

from specwire.engine.graphs.asks import ADJUSTS, PENALISES, STOPS
from specwire.engine.graphs.tensors import SlotState
from specwire.engine.sampling.slot import SlotSampling


def write_slot_tables(state: SlotState, slot: int, sampling: SlotSampling, flags: int) -> None:
    """Writes the rows that the flags name; the others may hold what an earlier sequence left.

    Args:
        state: of all slots.
        slot: the one that opens.
        sampling: has seen the tokens that it opens with.
        flags: see `asks.asked_numbers`.
    """
    if flags & ADJUSTS:
        _write_adjustments(state.adjustments[slot], sampling)
    if flags & (PENALISES | STOPS):
        _write_words(state.words[slot], state, sampling)


def _write_adjustments(row: torch.Tensor, sampling: SlotSampling) -> None:
    if sampling.allowed_ids is None:
        row.zero_()
    else:
        row.fill_(-torch.inf).index_fill_(0, _upload(sampling.allowed_ids, row.device), 0.0)
    if sampling.bias_ids is not None:
        row.index_add_(0, _upload(sampling.bias_ids, row.device), _upload(sampling.bias, row.device))
    if sampling.banned_ids is not None:
        row.index_fill_(0, _upload(sampling.banned_ids, row.device), -torch.inf)


def _write_words(row: torch.Tensor, state: SlotState, sampling: SlotSampling) -> None:
    row.zero_()
    if sampling.seen is not None:
        token_ids, counts, _ = sampling.seen.with_drafts(())
        words = counts[0].to(row.dtype) + state.seen_bit
        row.index_copy_(0, _upload(token_ids, row.device), _upload(words, row.device))
    if sampling.stop_ids is not None:
        stops = _upload(sampling.stop_ids, row.device)
        row.index_add_(0, stops, torch.full_like(stops, state.stop_bit, dtype=row.dtype))


def _upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device, from page-locked memory, so that nobody waits."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
