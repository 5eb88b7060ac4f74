"""The torch twins of the kernels in `round_ops`, for any device; they wait for it."""

import torch

from specwire.engine.graphs.asks import PENALISES, SYNTHETIC
from specwire.engine.graphs.tensors import DEAD, RoundInputs, SlotState
from specwire.engine.graphs.upload import CHANGE, FROM_DEVICE, HEADER, OPEN, ROW, SAMPLES, open_size
from specwire.engine.sampling.philox import Stream, noise_words


def apply_changes(upload: torch.Tensor, state: SlotState) -> None:
    """Writes opened slots' parameters and block-table changes into the state.

    Args:
        upload: as `Uploads` packs it, int32.
        state: of all slots.
    """
    num_rows, num_opens, num_changes, _ = upload[:HEADER].tolist()
    first = HEADER + num_rows * ROW
    size = open_size(state.thresholds.shape[1])
    records = upload[first : first + num_opens * size].view(-1, size)
    slots, bits, low, high, choices = records[:, :5].t()
    slots = slots.long()
    state.last_tokens[slots] = 0
    state.temperatures[slots] = bits.contiguous().view(torch.float32)
    state.keys[slots] = _joined(low, high)
    state.choices[slots] = choices
    state.asked[slots] = records[:, 5:OPEN]
    state.thresholds[slots] = _joined(records[:, OPEN::2], records[:, OPEN + 1 :: 2])
    first += num_opens * size
    slots, index, blocks = upload[first : first + num_changes * CHANGE].view(-1, CHANGE).t()
    state.block_tables[slots.long(), index.long()] = blocks


def prepare(upload: torch.Tensor, state: SlotState, inputs: RoundInputs, block_size: int, scratch_block: int) -> None:
    """Derives all of the inputs but the results from the upload and the state.

    Args:
        upload: as `Uploads` packs it.
        state: with this upload's changes.
        inputs: views of the sizes that this round is padded to.
        block_size: tokens of a block.
        scratch_block: where padding and dead rows write.
    """
    num_rows, num_opens, num_changes, num_tokens = upload[:HEADER].tolist()
    slots, query_lens, starts, num_outputs, flags = (column.long() for column in upload[HEADER : HEADER + num_rows * ROW].view(-1, ROW).t())
    from_device = (flags & FROM_DEVICE) != 0
    last_tokens = state.last_tokens[slots].long()
    dead = from_device & (last_tokens < 0)
    begins, logit_begins = query_lens.cumsum(0) - query_lens, num_outputs.cumsum(0) - num_outputs

    for starts_of, counts in ((inputs.cu_seqlens_q, query_lens), (inputs.logit_starts, num_outputs)):
        starts_of.fill_(int(counts.sum()))
        starts_of[: num_rows + 1] = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    inputs.seq_lens.zero_()
    inputs.seq_lens[:num_rows] = (starts + query_lens).masked_fill(dead, 0)
    inputs.block_tables[:num_rows] = state.block_tables[slots]
    inputs.slots.zero_()
    inputs.slots[:num_rows] = slots

    request = torch.arange(num_rows, device=upload.device).repeat_interleave(query_lens)
    offset = torch.arange(num_tokens, device=upload.device) - begins[request]
    positions = starts[request] + offset
    first = HEADER + num_rows * ROW + num_opens * open_size(state.thresholds.shape[1]) + num_changes * CHANGE
    token_ids = upload[first : first + num_tokens].long()
    token_ids = torch.where(from_device[request] & (offset == 0), last_tokens[request], token_ids)
    blocks = state.block_tables[slots[request], positions // block_size].long()
    slot_mapping = blocks * block_size + positions % block_size
    inputs.token_ids.zero_()
    inputs.token_ids[:num_tokens] = token_ids.masked_fill(dead[request], 0)
    inputs.positions.zero_()
    inputs.positions[:num_tokens] = positions
    inputs.slot_mapping.fill_(scratch_block * block_size)
    inputs.slot_mapping[:num_tokens] = slot_mapping.masked_fill(dead[request], scratch_block * block_size)

    num_logit_rows = int(num_outputs.sum())
    request = torch.arange(num_rows, device=upload.device).repeat_interleave(num_outputs)
    rows = (begins + query_lens - num_outputs - logit_begins)[request] + torch.arange(num_logit_rows, device=upload.device)
    for target, source in (
        (inputs.logit_rows, rows),
        (inputs.temperatures, state.temperatures[slots[request]]),
        (inputs.keys, state.keys[slots[request]]),
        (inputs.indices, positions[rows] + 1),
        (inputs.choices, state.choices[slots[request]]),
        (inputs.requests, request),
        (inputs.asks, (state.asked[slots, 0] * ((flags & SAMPLES) != 0))[request]),
    ):
        target.zero_()
        target[:num_logit_rows] = source


def accept(upload: torch.Tensor, state: SlotState, inputs: RoundInputs, target_ids: torch.Tensor) -> None:
    """Accepts the leading drafts that are the target's tokens, or as many as chance gives a synthetic slot; writes the results and the slots'
    last tokens, and counts emitted tokens for penalties.

    A result is: number of accepted drafts a, then the a + 1 emitted tokens (what follows is undefined). A bad row has -1 - a, and the drafts
    accepted before it; one of a dead slot has DEAD. Rows that don't sample have 0, or -1 if bad, and keep the slot's last token; a bad row
    makes the slot dead.

    Args:
        upload, state, inputs: as `prepare` left them.
        target_ids: [L] int64, the target's token at each row of logits, -1 where it is bad.
    """
    num_rows = int(upload[0])
    slots, _, _, num_outputs, flags = (column.long() for column in upload[HEADER : HEADER + num_rows * ROW].view(-1, ROW).t())
    num_columns = inputs.results.shape[1] - 1
    column = torch.arange(num_columns, device=upload.device)
    is_draft = column < num_outputs[:, None] - 1  # [R, K + 1]
    targets = target_ids[(inputs.logit_starts[:num_rows, None] + column).clamp_(max=len(target_ids) - 1).long()]
    draft_rows = inputs.cu_seqlens_q[1 : num_rows + 1, None] - num_outputs[:, None] + 1 + column
    drafts = inputs.token_ids[draft_rows.clamp_(max=len(inputs.token_ids) - 1)]
    asks = torch.where((flags & SAMPLES) != 0, state.asked[slots, 0], 0)[:, None]
    accepts = torch.where((asks & SYNTHETIC) != 0, _draws_accept(state, inputs, slots, num_columns) & (targets >= 0), drafts == targets)
    num_accepted = (is_draft & accepts).long().cumprod(1).sum(1)
    next_tokens = targets.gather(1, num_accepted[:, None])[:, 0]
    dead, samples = inputs.seq_lens[:num_rows] == 0, (flags & SAMPLES) != 0
    bad = dead | (next_tokens < 0)
    num_accepted = torch.where(samples, num_accepted, 0)
    first = torch.where(dead, DEAD, torch.where(bad, -1 - num_accepted, num_accepted))
    emitted = torch.where(column < num_accepted[:, None], drafts, targets)
    inputs.results[:num_rows] = torch.cat((first[:, None], emitted), 1).int()
    kept = torch.where(samples, next_tokens, state.last_tokens[slots].long())
    state.last_tokens[slots] = torch.where(bad, -1, kept).int()
    counted = (((asks & PENALISES) != 0) & ~bad[:, None] & (column <= num_accepted[:, None])).nonzero(as_tuple=True)
    places = (slots[counted[0]], emitted[counted])
    state.words.index_put_(places, torch.ones_like(places[0], dtype=state.words.dtype), accumulate=True)


def _draws_accept(state: SlotState, inputs: RoundInputs, slots: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Whether chance accepts the draft of each column, [R, K + 1]; False behind the last threshold."""
    column = torch.arange(num_columns, device=slots.device)
    rows = (inputs.logit_starts[: len(slots), None] + column).clamp_(max=len(inputs.indices) - 1).long()
    keys, choices = (numbers.repeat_interleave(num_columns) for numbers in (state.keys[slots], state.choices[slots].long()))
    words = noise_words(keys, inputs.indices[rows].flatten(), choices, Stream.SYNTHETIC, 1).view(rows.shape)
    return words < torch.nn.functional.pad(state.thresholds[slots], (0, 1))


def _joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int64 of two int32 halves."""
    return (low.long() & 0xFFFFFFFF) | (high.long() << 32)
