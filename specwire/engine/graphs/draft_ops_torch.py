"""The torch twins of the kernels in `draft_ops`, for any device; they wait for it."""

import torch

from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import CHANGE, HEADER, ROW
from specwire.engine.kernels.draft_sample_torch import draft_sample


def write_tables(upload: torch.Tensor, tables: torch.Tensor) -> None:
    """Writes block-table changes.

    Args:
        upload: as `DraftUploads` packs it, int32.
        tables: [N, max_blocks] int32, of all slots.
    """
    num_rows, num_changes, _ = upload[:HEADER].tolist()
    first = HEADER + num_rows * ROW
    slots, index, blocks = upload[first : first + num_changes * CHANGE].view(-1, CHANGE).t()
    tables[slots.long(), index.long()] = blocks


def prepare(upload: torch.Tensor, tables: torch.Tensor, inputs: DraftInputs, rows: DraftRows, block_size: int, scratch_block: int) -> None:
    """Derives the inputs of a call's first pass, and all of its rows but the results, from the upload.

    Args:
        upload: as `DraftUploads` packs it.
        tables: of all slots, with this upload's changes.
        inputs, rows: views of the sizes that the pass is padded to.
        block_size: tokens of a block.
        scratch_block: where padding writes.
    """
    num_rows, num_changes, num_tokens = upload[:HEADER].tolist()
    records = upload[HEADER : HEADER + num_rows * ROW].view(-1, ROW)
    slots, query_lens, starts, num_drafts, _, low, high, choices = records.long().unbind(1)
    ends = starts + query_lens
    begins = query_lens.cumsum(0) - query_lens
    inputs.cu_seqlens_q.fill_(num_tokens)
    inputs.cu_seqlens_q[:num_rows] = begins
    inputs.block_tables[:num_rows] = tables[slots]

    row = torch.arange(num_rows, device=upload.device).repeat_interleave(query_lens)
    positions = torch.arange(num_tokens, device=upload.device) + (starts - begins)[row]
    first = HEADER + num_rows * ROW + num_changes * CHANGE
    slot_mapping = tables[slots[row], positions // block_size].long() * block_size + positions % block_size
    inputs.slot_mapping.fill_(scratch_block * block_size)
    inputs.slot_mapping[:num_tokens] = slot_mapping
    for target, source in (
        (inputs.token_ids, upload[first : first + num_tokens]),
        (inputs.positions, positions),
        (inputs.seq_lens, ends),
        (rows.last_rows, begins + query_lens - 1),
        (rows.num_tokens, ends),
        (rows.num_drafts, num_drafts),
        (rows.temperatures, records[:, 4].contiguous().view(torch.float32)),
        (rows.keys, (low & 0xFFFFFFFF) | (high << 32)),
        (rows.choices, choices),
    ):
        target.zero_()
        target[: len(source)] = source


def draft(logits: torch.Tensor, inputs: DraftInputs, following: DraftInputs, rows: DraftRows, block_size: int, scratch_block: int) -> None:
    """Draws a draft for each row of a pass, and makes it the input of the next one; see `advance`.

    Args:
        logits: [R, vocab_size] float32, of each row's last token.
        inputs, following, rows, block_size, scratch_block: as in `advance`.
    """
    token_ids, probs = draft_sample(logits, rows.temperatures, rows.keys, inputs.seq_lens, rows.choices)
    advance(inputs, following, rows, token_ids, probs, block_size, scratch_block)


def advance(
    inputs: DraftInputs,
    following: DraftInputs,
    rows: DraftRows,
    token_ids: torch.Tensor,
    probs: torch.Tensor,
    block_size: int,
    scratch_block: int,
) -> None:
    """Notes the drafts of a pass, and makes them the inputs of the next one; rows that have all their drafts become padding.

    Args:
        inputs: of the pass that has run, R rows.
        following: [R] rows and tokens of the next pass; may be `inputs`.
        rows: of the call.
        token_ids: [R] int64, drafted.
        probs: [R] float32.
        block_size, scratch_block: as in `prepare`.
    """
    seq_lens = inputs.seq_lens.long()
    index = seq_lens - rows.num_tokens
    is_real = (seq_lens > 0) & (index < rows.num_drafts)
    real = is_real.nonzero()[:, 0]
    rows.results[real, 0, index[real]] = token_ids[real].int()
    rows.results[real, 1, index[real]] = probs[real].view(torch.int32)
    goes_on = is_real & (index + 1 < rows.num_drafts)
    position = torch.where(goes_on, seq_lens, 0)
    blocks = inputs.block_tables.gather(1, (position // block_size)[:, None])[:, 0].long()
    following.token_ids.copy_(torch.where(goes_on, token_ids, 0))
    following.positions.copy_(position)
    following.slot_mapping.copy_(torch.where(goes_on, blocks, scratch_block) * block_size + position % block_size)
    following.seq_lens.copy_(torch.where(goes_on, seq_lens + 1, 0))
