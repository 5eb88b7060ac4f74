"""What surrounds the model in a round, in Triton: the upload into the slot state and the inputs, and acceptance.

Their torch twins are in `round_ops_torch`. Sizes of the round come from the upload, those of its padding are arguments.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs.tensors import DEAD, RoundInputs, SlotState
from specwire.engine.graphs.upload import CHANGE, FROM_DEVICE, HEADER, OPEN, ROW, SAMPLES

_CHANGE_PROGRAMS = 16


def apply_changes(upload: torch.Tensor, state: SlotState) -> None:
    """See `round_ops_torch.apply_changes`."""
    apply_changes_kernel[(_CHANGE_PROGRAMS,)](
        upload, state.last_tokens, state.temperatures, state.keys, state.choices, state.block_tables, state.block_tables.stride(0),
        HEADER=HEADER, ROW=ROW, OPEN=OPEN, CHANGE=CHANGE, BLOCK=128, num_warps=4,
    )  # fmt: skip


def prepare(upload: torch.Tensor, state: SlotState, inputs: RoundInputs, block_size: int, scratch_block: int) -> None:
    """See `round_ops_torch.prepare`."""
    num_requests = inputs.seq_lens.shape[0]
    prepare_kernel[(num_requests,)](
        upload,
        state.last_tokens, state.temperatures, state.keys, state.choices, state.block_tables,
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_tables,
        inputs.logit_starts, inputs.logit_rows, inputs.temperatures, inputs.keys, inputs.indices, inputs.choices,
        inputs.token_ids.shape[0], inputs.logit_rows.shape[0], state.block_tables.stride(0), scratch_block * block_size,
        HEADER=HEADER, ROW=ROW, OPEN=OPEN, CHANGE=CHANGE, FROM_DEVICE=FROM_DEVICE, BLOCK_SIZE=block_size,
        REQUESTS=triton.next_power_of_2(num_requests), BLOCK=128, num_warps=4,
    )  # fmt: skip


def accept(upload: torch.Tensor, state: SlotState, inputs: RoundInputs, target_ids: torch.Tensor) -> None:
    """See `round_ops_torch.accept`."""
    num_columns = inputs.results.shape[1] - 1
    accept_kernel[(inputs.seq_lens.shape[0],)](
        upload, state.last_tokens, inputs.token_ids, inputs.cu_seqlens_q, inputs.seq_lens, inputs.logit_starts, target_ids, inputs.results,
        HEADER=HEADER, ROW=ROW, SAMPLES=SAMPLES, DEAD=DEAD, NUM_COLUMNS=num_columns, COLUMNS=triton.next_power_of_2(num_columns), num_warps=1,
    )  # fmt: skip


@triton.jit
def apply_changes_kernel(
    upload,
    last_tokens,
    temperatures,
    keys,
    choices,
    block_tables,
    table_stride,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    OPEN: tl.constexpr,
    CHANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any grid."""
    opens = upload + HEADER + tl.load(upload) * ROW
    num_opens = tl.load(upload + 1)
    changes = opens + num_opens * OPEN
    num_changes = tl.load(upload + 2)
    for begin in range(tl.program_id(0) * BLOCK, num_opens, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_opens
        record = opens + index * OPEN
        slot = tl.load(record, inside, 0)
        low = tl.load(record + 2, inside, 0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(record + 3, inside, 0).to(tl.int64)
        tl.store(last_tokens + slot, tl.zeros_like(slot), inside)
        tl.store(temperatures + slot, tl.load(record + 1, inside, 0).to(tl.float32, bitcast=True), inside)
        tl.store(keys + slot, low | (high << 32), inside)
        tl.store(choices + slot, tl.load(record + 4, inside, 0), inside)
    for begin in range(tl.program_id(0) * BLOCK, num_changes, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_changes
        record = changes + index * CHANGE
        slot = tl.load(record, inside, 0).to(tl.int64)
        tl.store(block_tables + slot * table_stride + tl.load(record + 1, inside, 0), tl.load(record + 2, inside, 0), inside)


@triton.jit(do_not_specialize=["num_padded_tokens", "num_padded_logit_rows", "scratch_slot"])
def prepare_kernel(
    upload,
    last_tokens,
    slot_temperatures,
    slot_keys,
    slot_choices,
    slot_tables,
    token_ids,
    positions,
    slot_mapping,
    cu_seqlens_q,
    seq_lens,
    block_tables,
    logit_starts,
    logit_rows,
    temperatures,
    keys,
    indices,
    choices,
    num_padded_tokens,
    num_padded_logit_rows,
    table_stride,
    scratch_slot,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    OPEN: tl.constexpr,
    CHANGE: tl.constexpr,
    FROM_DEVICE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (requests, padding included); every program sums the lengths before its own."""
    request = tl.program_id(0)
    num_rows = tl.load(upload)
    tokens = upload + HEADER + num_rows * ROW + tl.load(upload + 1) * OPEN + tl.load(upload + 2) * CHANGE
    row = tl.arange(0, REQUESTS)
    query_lens = tl.load(upload + HEADER + row * ROW + 1, row < num_rows, 0)
    nums_output = tl.load(upload + HEADER + row * ROW + 3, row < num_rows, 0)
    first = tl.sum(tl.where(row < request, query_lens, 0), 0)
    first_logit = tl.sum(tl.where(row < request, nums_output, 0), 0)
    num_tokens = tl.sum(query_lens, 0)
    num_logit_rows = tl.sum(nums_output, 0)

    record = upload + HEADER + request * ROW
    real = request < num_rows
    slot = tl.load(record, real, 0).to(tl.int64)
    query_len = tl.load(record + 1, real, 0)
    start = tl.load(record + 2, real, 0)
    num_output = tl.load(record + 3, real, 0)
    from_device = (tl.load(record + 4, real, 0) & FROM_DEVICE) != 0
    last_token = tl.load(last_tokens + slot)
    dead = from_device & (last_token < 0)
    seq_len = tl.where(dead, 0, start + query_len)

    tl.store(cu_seqlens_q + request + 1, first + query_len)
    tl.store(logit_starts + request + 1, first_logit + num_output)
    tl.store(seq_lens + request, seq_len)
    if request == 0:
        tl.store(cu_seqlens_q, 0)
        tl.store(logit_starts, 0)

    temperature = tl.load(slot_temperatures + slot)
    key = tl.load(slot_keys + slot)
    choice = tl.load(slot_choices + slot).to(tl.int64)
    table = slot_tables + slot * table_stride
    for begin in range(0, query_len, BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        inside = offset < query_len
        position = start + offset
        token = tl.load(tokens + first + offset, inside, 0)
        token = tl.where(from_device & (offset == 0), last_token, token)
        block = tl.load(table + position // BLOCK_SIZE, inside, 0).to(tl.int64)
        target = tl.where(dead, scratch_slot, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(token_ids + first + offset, tl.where(dead, 0, token).to(tl.int64), inside)
        tl.store(positions + first + offset, position.to(tl.int64), inside)
        tl.store(slot_mapping + first + offset, target, inside)
        output = offset - (query_len - num_output)
        has_logits = inside & (output >= 0)
        output += first_logit
        tl.store(logit_rows + output, (first + offset).to(tl.int64), has_logits)
        tl.store(indices + output, (position + 1).to(tl.int64), has_logits)
        tl.store(temperatures + output, tl.zeros([BLOCK], tl.float32) + temperature, has_logits)
        tl.store(keys + output, tl.zeros([BLOCK], tl.int64) + key, has_logits)
        tl.store(choices + output, tl.zeros([BLOCK], tl.int64) + choice, has_logits)
    for begin in range(0, tl.cdiv(seq_len, BLOCK_SIZE) * real.to(tl.int32), BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < tl.cdiv(seq_len, BLOCK_SIZE)
        tl.store(block_tables + request.to(tl.int64) * table_stride + index, tl.load(table + index, inside, 0), inside)

    zero = tl.zeros([BLOCK], tl.int64)
    for begin in range(num_tokens + request * BLOCK, num_padded_tokens, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_padded_tokens
        tl.store(token_ids + index, zero, inside)
        tl.store(positions + index, zero, inside)
        tl.store(slot_mapping + index, zero + scratch_slot, inside)
    for begin in range(num_logit_rows + request * BLOCK, num_padded_logit_rows, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_padded_logit_rows
        tl.store(logit_rows + index, zero, inside)
        tl.store(indices + index, zero, inside)
        tl.store(temperatures + index, zero.to(tl.float32), inside)
        tl.store(keys + index, zero, inside)
        tl.store(choices + index, zero, inside)


@triton.jit
def accept_kernel(
    upload,
    last_tokens,
    token_ids,
    cu_seqlens_q,
    seq_lens,
    logit_starts,
    target_ids,
    results,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    SAMPLES: tl.constexpr,
    DEAD: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (requests, padding included)."""
    request = tl.program_id(0)
    if request >= tl.load(upload):
        return
    record = upload + HEADER + request * ROW
    slot = tl.load(record)
    samples = (tl.load(record + 4) & SAMPLES) != 0
    first_logit = tl.load(logit_starts + request)
    num_output = tl.load(logit_starts + request + 1) - first_logit
    column = tl.arange(0, COLUMNS)
    target = tl.load(target_ids + first_logit + column, column < num_output, -1).to(tl.int32)
    first_draft = tl.load(cu_seqlens_q + request + 1) - num_output + 1
    draft = tl.load(token_ids + first_draft + column, column < num_output - 1, -2).to(tl.int32)
    num_accepted = tl.min(tl.where(draft == target, COLUMNS, column), 0)
    next_token = tl.sum(tl.where(column == num_accepted, target, 0), 0)
    dead = tl.load(seq_lens + request) == 0
    bad = dead | (next_token < 0)
    num_accepted = tl.where(samples, num_accepted, 0)
    result = results + request * (NUM_COLUMNS + 1)
    tl.store(result, tl.where(dead, DEAD, tl.where(bad, -1 - num_accepted, num_accepted)))
    tl.store(result + 1 + column, target, column < NUM_COLUMNS)
    kept = tl.where(samples, next_token, tl.load(last_tokens + slot))
    tl.store(last_tokens + slot, tl.where(bad, -1, kept))
