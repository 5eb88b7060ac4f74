"""What surrounds the model in a round, in Triton: the upload into the slot state and the inputs, and acceptance.

Their torch twins are in `round_ops_torch`. Sizes of the round come from the upload, those of its padding are arguments.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs.tensors import DEAD, RoundInputs, SlotState
from specwire.engine.graphs.upload import CHANGE, FROM_DEVICE, HEADER, OPEN, ROW, SAMPLES, open_size
from specwire.engine.sampling.philox import Stream

PENALISES, SYNTHETIC, ASKED = (tl.constexpr(number) for number in (flags.PENALISES, flags.SYNTHETIC, flags.ASKED))

_CHANGE_PROGRAMS = 16


def apply_changes(upload: torch.Tensor, state: SlotState) -> None:
    """See `round_ops_torch.apply_changes`."""
    apply_changes_kernel[(_CHANGE_PROGRAMS,)](
        upload, state.last_tokens, state.temperatures, state.keys, state.choices, state.block_tables, state.asked, state.thresholds,
        state.block_tables.stride(0),
        HEADER=HEADER, ROW=ROW, OPEN=OPEN, THRESHOLDS=state.thresholds.shape[1], CHANGE=CHANGE, BLOCK=128, num_warps=4,
    )  # fmt: skip


def prepare(upload: torch.Tensor, state: SlotState, inputs: RoundInputs, block_size: int, scratch_block: int) -> None:
    """See `round_ops_torch.prepare`."""
    num_requests = inputs.seq_lens.shape[0]
    prepare_kernel[(num_requests,)](
        upload,
        state.last_tokens, state.temperatures, state.keys, state.choices, state.block_tables, state.asked,
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_tables,
        inputs.logit_starts, inputs.logit_rows, inputs.temperatures, inputs.keys, inputs.indices, inputs.choices,
        inputs.slots, inputs.requests, inputs.asks,
        inputs.token_ids.shape[0], inputs.logit_rows.shape[0], state.block_tables.stride(0), scratch_block * block_size,
        HEADER=HEADER, ROW=ROW, OPEN_SIZE=open_size(state.thresholds.shape[1]), CHANGE=CHANGE, FROM_DEVICE=FROM_DEVICE, SAMPLES=SAMPLES,
        BLOCK_SIZE=block_size,
        REQUESTS=triton.next_power_of_2(num_requests), BLOCK=128, num_warps=4,
    )  # fmt: skip


def accept(upload: torch.Tensor, state: SlotState, inputs: RoundInputs, target_ids: torch.Tensor) -> None:
    """See `round_ops_torch.accept`."""
    num_columns = inputs.results.shape[1] - 1
    accept_kernel[(inputs.seq_lens.shape[0],)](
        upload, state.last_tokens, inputs.token_ids, inputs.cu_seqlens_q, inputs.seq_lens, inputs.logit_starts, target_ids, inputs.results,
        state.asked, state.keys, state.choices, state.thresholds, inputs.indices, state.words, state.words.shape[1],
        HEADER=HEADER, ROW=ROW, SAMPLES=SAMPLES, DEAD=DEAD, STREAM=int(Stream.SYNTHETIC), NUM_COLUMNS=num_columns,
        COLUMNS=triton.next_power_of_2(num_columns), num_warps=1,
    )  # fmt: skip


@triton.jit
def load_joined(halves, inside):
    """int64 of two int32 halves, the low one first."""
    return (tl.load(halves, inside, 0).to(tl.int64) & 0xFFFFFFFF) | (tl.load(halves + 1, inside, 0).to(tl.int64) << 32)


@triton.jit
def apply_changes_kernel(
    upload,
    last_tokens,
    temperatures,
    keys,
    choices,
    block_tables,
    asked,
    thresholds,
    table_stride,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    OPEN: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    CHANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any grid."""
    OPEN_SIZE: tl.constexpr = OPEN + 2 * THRESHOLDS
    opens = upload + HEADER + tl.load(upload) * ROW
    num_opens = tl.load(upload + 1)
    changes = opens + num_opens * OPEN_SIZE
    num_changes = tl.load(upload + 2)
    for begin in range(tl.program_id(0) * BLOCK, num_opens, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < num_opens
        record = opens + index * OPEN_SIZE
        slot = tl.load(record, inside, 0)
        tl.store(last_tokens + slot, tl.zeros_like(slot), inside)
        tl.store(temperatures + slot, tl.load(record + 1, inside, 0).to(tl.float32, bitcast=True), inside)
        tl.store(keys + slot, load_joined(record + 2, inside), inside)
        tl.store(choices + slot, tl.load(record + 4, inside, 0), inside)
        for number in range(ASKED):
            tl.store(asked + slot * ASKED + number, tl.load(record + 5 + number, inside, 0), inside)
        for position in range(THRESHOLDS):
            tl.store(thresholds + slot * THRESHOLDS + position, load_joined(record + OPEN + 2 * position, inside), inside)
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
    slot_asked,
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
    slots,
    requests,
    asks,
    num_padded_tokens,
    num_padded_logit_rows,
    table_stride,
    scratch_slot,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    OPEN_SIZE: tl.constexpr,
    CHANGE: tl.constexpr,
    FROM_DEVICE: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (requests, padding included); every program sums the lengths before its own."""
    request = tl.program_id(0)
    num_rows = tl.load(upload)
    tokens = upload + HEADER + num_rows * ROW + tl.load(upload + 1) * OPEN_SIZE + tl.load(upload + 2) * CHANGE
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
    row_flags = tl.load(record + 4, real, 0)
    from_device = (row_flags & FROM_DEVICE) != 0
    last_token = tl.load(last_tokens + slot)
    dead = from_device & (last_token < 0)
    seq_len = tl.where(dead, 0, start + query_len)

    tl.store(cu_seqlens_q + request + 1, first + query_len)
    tl.store(logit_starts + request + 1, first_logit + num_output)
    tl.store(seq_lens + request, seq_len)
    tl.store(slots + request, slot.to(tl.int32))
    if request == 0:
        tl.store(cu_seqlens_q, 0)
        tl.store(logit_starts, 0)

    temperature = tl.load(slot_temperatures + slot)
    key = tl.load(slot_keys + slot)
    choice = tl.load(slot_choices + slot).to(tl.int64)
    asked = tl.where((row_flags & SAMPLES) != 0, tl.load(slot_asked + slot * ASKED), 0)
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
        tl.store(requests + output, tl.zeros([BLOCK], tl.int32) + request, has_logits)
        tl.store(asks + output, tl.zeros([BLOCK], tl.int32) + asked, has_logits)
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
        tl.store(requests + index, zero.to(tl.int32), inside)
        tl.store(asks + index, zero.to(tl.int32), inside)


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
    slot_asked,
    keys,
    choices,
    thresholds,
    indices,
    words,
    vocab_size,
    HEADER: tl.constexpr,
    ROW: tl.constexpr,
    SAMPLES: tl.constexpr,
    DEAD: tl.constexpr,
    STREAM: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (requests, padding included)."""
    request = tl.program_id(0)
    if request >= tl.load(upload):
        return
    record = upload + HEADER + request * ROW
    slot = tl.load(record).to(tl.int64)
    samples = (tl.load(record + 4) & SAMPLES) != 0
    first_logit = tl.load(logit_starts + request)
    num_output = tl.load(logit_starts + request + 1) - first_logit
    column = tl.arange(0, COLUMNS)
    target = tl.load(target_ids + first_logit + column, column < num_output, -1).to(tl.int32)
    first_draft = tl.load(cu_seqlens_q + request + 1) - num_output + 1
    draft = tl.load(token_ids + first_draft + column, column < num_output - 1, -2).to(tl.int32)
    asks = tl.where(samples, tl.load(slot_asked + slot * ASKED), 0)
    accepts = draft == target
    if (asks & SYNTHETIC) != 0:
        is_draft = column < num_output - 1
        index = tl.load(indices + first_logit + column, is_draft, 0).to(tl.uint32)
        stream = tl.full([COLUMNS], STREAM, tl.uint32)
        choice = tl.load(choices + slot).to(tl.uint32)
        word, _, _, _ = tl.philox(tl.load(keys + slot), tl.zeros([COLUMNS], tl.uint32), index, choice, stream)
        threshold = tl.load(thresholds + slot * (NUM_COLUMNS - 1) + column, is_draft, 0)
        accepts = is_draft & (target >= 0) & (word.to(tl.int64) < threshold)
    num_accepted = tl.min(tl.where(accepts, COLUMNS, column), 0)
    next_token = tl.sum(tl.where(column == num_accepted, target, 0), 0)
    dead = tl.load(seq_lens + request) == 0
    bad = dead | (next_token < 0)
    num_accepted = tl.where(samples, num_accepted, 0)
    result = results + request * (NUM_COLUMNS + 1)
    tl.store(result, tl.where(dead, DEAD, tl.where(bad, -1 - num_accepted, num_accepted)))
    emitted = tl.where(column < num_accepted, draft, target)
    tl.store(result + 1 + column, emitted, column < NUM_COLUMNS)
    kept = tl.where(samples, next_token, tl.load(last_tokens + slot))
    tl.store(last_tokens + slot, tl.where(bad, -1, kept))
    if ((asks & PENALISES) != 0) & (bad == 0):
        # Each token's word is written once, whatever the number of times that the row emitted it.
        counted = column <= num_accepted
        same = (emitted[:, None] == emitted[None, :]) & counted[None, :]
        is_first = tl.sum((same & (column[None, :] < column[:, None])).to(tl.int32), 1) == 0
        word_of = words + slot * vocab_size + emitted
        is_written = counted & is_first
        old = tl.load(word_of, is_written, 0)
        tl.store(word_of, old + tl.sum(same.to(tl.int32), 1).to(old.dtype), is_written)
