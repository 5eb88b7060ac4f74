"""What surrounds the model in drafting, in Triton: the upload into the first pass's inputs, and each draft into the next one's.

Their torch twins are in `draft_ops_torch`. Sizes of the call come from the upload, those of its padding are arguments.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import CHANGE, HEADER, ROW
from specwire.engine.kernels.draft_sample import draft_sample

_CHANGE_PROGRAMS = 16
_BLOCK = 128


def write_tables(upload: torch.Tensor, tables: torch.Tensor) -> None:
    """See `draft_ops_torch.write_tables`."""
    write_tables_kernel[(_CHANGE_PROGRAMS,)](upload, tables, tables.stride(0), HEADER=HEADER, ROW=ROW, CHANGE=CHANGE, BLOCK=_BLOCK, num_warps=4)


def prepare(upload: torch.Tensor, tables: torch.Tensor, inputs: DraftInputs, rows: DraftRows, block_size: int, scratch_block: int) -> None:
    """See `draft_ops_torch.prepare`."""
    num_rows = inputs.seq_lens.shape[0]
    prepare_kernel[(num_rows,)](
        upload, tables,
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_tables,
        rows.last_rows, rows.num_tokens, rows.num_drafts, rows.temperatures, rows.keys, rows.choices,
        inputs.token_ids.shape[0], tables.stride(0), scratch_block * block_size,
        HEADER=HEADER, ROW=ROW, CHANGE=CHANGE, BLOCK_SIZE=block_size, ROWS=triton.next_power_of_2(num_rows), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def draft(logits: torch.Tensor, inputs: DraftInputs, following: DraftInputs, rows: DraftRows, block_size: int, scratch_block: int) -> None:
    """See `draft_ops_torch.draft`."""
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
    """See `draft_ops_torch.advance`."""
    num_rows = inputs.seq_lens.shape[0]
    advance_kernel[(triton.cdiv(num_rows, _BLOCK),)](
        inputs.seq_lens, inputs.block_tables, following.token_ids, following.positions, following.slot_mapping, following.seq_lens,
        rows.num_tokens, rows.num_drafts, rows.results, token_ids, probs,
        num_rows, inputs.block_tables.stride(0), scratch_block * block_size,
        NUM_DRAFTS=rows.results.shape[2], BLOCK_SIZE=block_size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def write_tables_kernel(upload, tables, table_stride, HEADER: tl.constexpr, ROW: tl.constexpr, CHANGE: tl.constexpr, BLOCK: tl.constexpr):
    """Any grid."""
    changes = upload + HEADER + tl.load(upload) * ROW
    num_changes = tl.load(upload + 1)
    for begin in range(tl.program_id(0) * BLOCK, num_changes, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_changes
        record = changes + index * CHANGE
        slot = tl.load(record, inside, 0).to(tl.int64)
        tl.store(tables + slot * table_stride + tl.load(record + 1, inside, 0), tl.load(record + 2, inside, 0), inside)


@triton.jit(do_not_specialize=["num_padded_tokens", "table_stride", "scratch_slot"])
def prepare_kernel(
    upload,
    tables,
    token_ids,
    positions,
    slot_mapping,
    cu_seqlens_q,
    seq_lens,
    block_tables,
    last_rows,
    nums_tokens,
    nums_drafts,
    temperatures,
    keys,
    choices,
    num_padded_tokens,
    table_stride,
    scratch_slot,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    CHANGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, padding included); every program sums the lengths before its own."""
    row = tl.program_id(0)
    num_rows = tl.load(upload)
    tokens = upload + HEADER + num_rows * ROW + tl.load(upload + 1) * CHANGE
    every = tl.arange(0, ROWS)
    query_lens = tl.load(upload + HEADER + every * ROW + 1, every < num_rows, 0)
    first = tl.sum(tl.where(every < row, query_lens, 0), 0)
    num_tokens = tl.sum(query_lens, 0)

    record = upload + HEADER + row * ROW
    real = row < num_rows
    slot = tl.load(record, real, 0).to(tl.int64)
    query_len = tl.load(record + 1, real, 0)
    start = tl.load(record + 2, real, 0)
    num_drafts = tl.load(record + 3, real, 0)
    low = tl.load(record + 5, real, 0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(record + 6, real, 0).to(tl.int64)
    end = start + query_len
    if row == 0:
        tl.store(cu_seqlens_q, 0)
    tl.store(cu_seqlens_q + row + 1, first + query_len)
    tl.store(seq_lens + row, end)
    tl.store(last_rows + row, tl.where(real, first + query_len - 1, 0).to(tl.int64))
    tl.store(nums_tokens + row, end)
    tl.store(nums_drafts + row, num_drafts)
    tl.store(temperatures + row, tl.load(record + 4, real, 0).to(tl.float32, bitcast=True))
    tl.store(keys + row, low | (high << 32))
    tl.store(choices + row, tl.load(record + 7, real, 0))

    table = tables + slot * table_stride
    for begin in range(0, query_len, BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        inside = offset < query_len
        position = start + offset
        block = tl.load(table + position // BLOCK_SIZE, inside, 0).to(tl.int64)
        tl.store(token_ids + first + offset, tl.load(tokens + first + offset, inside, 0).to(tl.int64), inside)
        tl.store(positions + first + offset, position.to(tl.int64), inside)
        tl.store(slot_mapping + first + offset, block * BLOCK_SIZE + position % BLOCK_SIZE, inside)
    # The last draft is never fed, so that it needs no block.
    num_blocks = tl.cdiv(end + tl.maximum(num_drafts, 1) - 1, BLOCK_SIZE)
    for begin in range(0, num_blocks, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_blocks
        tl.store(block_tables + row.to(tl.int64) * table_stride + index, tl.load(table + index, inside, 0), inside)

    zero = tl.zeros([BLOCK], tl.int64)
    for begin in range(num_tokens + row * BLOCK, num_padded_tokens, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_padded_tokens
        tl.store(token_ids + index, zero, inside)
        tl.store(positions + index, zero, inside)
        tl.store(slot_mapping + index, zero + scratch_slot, inside)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "scratch_slot"])
def advance_kernel(
    seq_lens,
    block_tables,
    next_token_ids,
    next_positions,
    next_slot_mapping,
    next_seq_lens,
    nums_tokens,
    nums_drafts,
    results,
    token_ids,
    probs,
    num_rows,
    table_stride,
    scratch_slot,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of rows). What is read of a row is read before it is written: both may be the same tensors."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    seq_len = tl.load(seq_lens + row, inside, 0)
    num_drafts = tl.load(nums_drafts + row, inside, 0)
    index = seq_len - tl.load(nums_tokens + row, inside, 0)
    real = inside & (seq_len > 0) & (index < num_drafts)
    token = tl.load(token_ids + row, inside, 0)
    prob = tl.load(probs + row, inside, 0.0)
    result = results + row * (2 * NUM_DRAFTS) + index
    tl.store(result, token.to(tl.int32), real)
    tl.store(result + NUM_DRAFTS, prob.to(tl.int32, bitcast=True), real)

    goes_on = real & (index + 1 < num_drafts)
    block = tl.load(block_tables + row.to(tl.int64) * table_stride + seq_len // BLOCK_SIZE, goes_on, 0).to(tl.int64)
    slot = tl.where(goes_on, block * BLOCK_SIZE + seq_len % BLOCK_SIZE, scratch_slot)
    tl.store(next_token_ids + row, tl.where(goes_on, token, 0), inside)
    tl.store(next_positions + row, tl.where(goes_on, seq_len, 0).to(tl.int64), inside)
    tl.store(next_slot_mapping + row, slot, inside)
    tl.store(next_seq_lens + row, tl.where(goes_on, seq_len + 1, 0), inside)
