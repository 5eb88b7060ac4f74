"""Causal attention of ragged queries over paged KV in Triton: the kernel behind `ragged_attention` on a GPU.

One program takes one item of the step's work list (`work_list`) for one KV head: a tile of query tokens with all query heads that share
the KV head, over all or a split of the positions. Scores and sums are float32 with an online softmax (https://arxiv.org/abs/2307.08691).
"""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.work_list import RECORD, SMALL_ROWS, DeviceAttentionPlan

_LOG2_E = 1.4426950408889634
_MERGE_STAGES = 4


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: DeviceAttentionPlan,
    output: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """Attention as `ragged_attention` defines it; the plan holds the lengths.

    Args:
        query: [T, num_heads, head_dim]; the last two dimensions contiguous.
        kv_cache: one layer [num_blocks, block_size, 2, num_kv_heads, head_dim], contiguous.
        block_tables: [S, max_blocks] int32, rows contiguous.
        scale: factor on the scores, positive.
        plan: updated with the lengths of this step.
        output: [T, num_heads, head_dim], contiguous; rows of no request stay as they are.
        early: the kernel starts before the one before it has ended; block_tables and the plan were made before the last barrier (see `early`).
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    assert scale > 0, scale
    assert query.stride()[1:] == (head_dim, 1), query.stride()
    assert kv_cache.is_contiguous(), kv_cache.stride()
    assert output.is_contiguous(), output.stride()
    assert block_tables.stride(1) == 1, block_tables.stride()
    assert num_heads == plan.group * num_kv_heads, (num_heads, plan.group, num_kv_heads)
    scratch, tuning = plan.scratch, plan.scratch.tuning
    attend[(num_kv_heads, plan.max_items)](
        query,
        kv_cache,
        block_tables,
        plan.items,
        scratch.output,
        scratch.stats,
        scratch.arrived,
        output,
        scale * _LOG2_E,
        query.stride(0),
        block_tables.stride(0),
        scratch.num_items,
        GROUP=plan.group,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE_ROWS=plan.tile_rows,
        SMALL_ROWS=SMALL_ROWS,
        TILE_POSITIONS=tuning.tile_positions,
        RECORD=RECORD,
        MERGE_STAGES=_MERGE_STAGES,
        CAUSAL=plan.is_causal,
        STAGES=tuning.num_stages,
        LARGE_STAGES=tuning.large_stages,
        EARLY=early,
        num_warps=tuning.num_warps,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["table_stride", "num_scratch_items"])
def attend(
    query,
    kv_cache,
    block_tables,
    items,
    partial_output,
    partial_stats,
    arrived,
    output,
    scale_log2,
    query_stride,
    table_stride,
    num_scratch_items,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    TILE_POSITIONS: tl.constexpr,
    RECORD: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (KV heads, items): neighbours read neighbouring memory."""
    announce(EARLY)
    head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * RECORD
    query_start = tl.load(record)
    row_begin = tl.load(record + 2)
    num_rows = tl.minimum(tl.load(record + 1) - row_begin, TILE_ROWS)
    context_len = tl.load(record + 3)
    kv_begin = tl.load(record + 4)
    kv_end = tl.load(record + 5)
    table = block_tables + tl.load(record + 6).to(tl.int64) * table_stride
    splits = tl.load(record + 7)
    num_splits = splits // 65536
    keys = kv_cache + head * HEAD_DIM
    wait(EARLY)
    if num_splits == 0:
        return
    first_item = item - splits % 65536
    stats_size = num_scratch_items * KV_HEADS * TILE_ROWS

    if SMALL_ROWS < TILE_ROWS and num_rows <= SMALL_ROWS:
        _attend_tile(
            query, keys, table, partial_output, partial_stats, output, scale_log2, query_stride, stats_size, query_start, row_begin, num_rows,
            context_len, kv_begin, kv_end, num_splits, item, head,
            GROUP, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SMALL_ROWS, TILE_ROWS, TILE_POSITIONS, CAUSAL, STAGES,
        )  # fmt: skip
    else:
        _attend_tile(
            query, keys, table, partial_output, partial_stats, output, scale_log2, query_stride, stats_size, query_start, row_begin, num_rows,
            context_len, kv_begin, kv_end, num_splits, item, head,
            GROUP, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_ROWS, TILE_ROWS, TILE_POSITIONS, CAUSAL, LARGE_STAGES,
        )  # fmt: skip

    if num_splits > 1:
        # Every thread's partial result is written before one of them counts this program as arrived.
        tl.debug_barrier()
        counter = arrived + first_item * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            tl.store(counter, 0)
            if SMALL_ROWS < TILE_ROWS and num_rows <= SMALL_ROWS:
                _merge(
                    partial_output, partial_stats, output, stats_size, query_start, row_begin, num_rows, num_splits, first_item, head,
                    GROUP, KV_HEADS, HEAD_DIM, SMALL_ROWS, TILE_ROWS, MERGE_STAGES,
                )  # fmt: skip
            else:
                _merge(
                    partial_output, partial_stats, output, stats_size, query_start, row_begin, num_rows, num_splits, first_item, head,
                    GROUP, KV_HEADS, HEAD_DIM, TILE_ROWS, TILE_ROWS, MERGE_STAGES,
                )  # fmt: skip


@triton.jit
def _attend_tile(
    query,
    keys,
    table,
    partial_output,
    partial_stats,
    output,
    scale_log2,
    query_stride,
    stats_size,
    query_start,
    row_begin,
    num_rows,
    context_len,
    kv_begin,
    kv_end,
    num_splits,
    item,
    head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_POSITIONS: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Row r of the tile is head (row_begin + r) % GROUP of query token (row_begin + r) // GROUP."""
    row = tl.arange(0, ROWS)
    real = row < num_rows
    token = (row_begin + row) // GROUP
    query_head = head * GROUP + (row_begin + row) % GROUP
    dim = tl.arange(0, HEAD_DIM)
    query_row = (query_start + token).to(tl.int64)
    q = tl.load(query + (query_row * query_stride + query_head * HEAD_DIM)[:, None] + dim[None, :], real[:, None], 0.0)
    last_visible = context_len + token

    # A finite start: a row that sees nothing of its split keeps it, and weighs nothing when splits are merged.
    maximum = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in tl.range(kv_begin, kv_end, TILE_POSITIONS, num_stages=STAGES):
        position = start + tl.arange(0, TILE_POSITIONS)
        inside = position < kv_end
        block = tl.load(table + position // BLOCK_SIZE, inside, 0).to(tl.int64)
        slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * (2 * KV_HEADS * HEAD_DIM)
        pointer = keys + slot[:, None] + dim[None, :]
        key = tl.load(pointer, inside[:, None], 0.0)
        value = tl.load(pointer + KV_HEADS * HEAD_DIM, inside[:, None], 0.0)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        if CAUSAL:
            score = tl.where(position[None, :] <= last_visible[:, None], score, float("-inf"))
        else:
            score = tl.where(inside[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        decay = tl.exp2((maximum - new_maximum) * scale_log2)
        weight = tl.exp2(score * scale_log2 - (new_maximum * scale_log2)[:, None])
        total = total * decay + tl.sum(weight, 1)
        result = tl.dot(weight.to(value.dtype), value, result * decay[:, None], input_precision="ieee")
        maximum = new_maximum

    if num_splits == 1:
        pointer = output + ((query_row * KV_HEADS * GROUP + query_head) * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(pointer, result / tl.maximum(total, 1e-30)[:, None], real[:, None])
    else:
        partial = (item * KV_HEADS + head) * TILE_ROWS + row
        tl.store(partial_output + partial[:, None] * HEAD_DIM + dim[None, :], result, real[:, None])
        tl.store(partial_stats + partial, maximum * scale_log2, real)
        tl.store(partial_stats + stats_size + partial, total, real)


@triton.jit
def _merge(
    partial_output,
    partial_stats,
    output,
    stats_size,
    query_start,
    row_begin,
    num_rows,
    num_splits,
    first_item,
    head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums the splits of a tile, weighted by their maxima. Loads pass by the first-level cache: other multiprocessors wrote this."""
    row = tl.arange(0, ROWS)
    real = row < num_rows
    dim = tl.arange(0, HEAD_DIM)
    maximum = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for split in tl.range(0, num_splits, num_stages=STAGES):
        partial = ((first_item + split) * KV_HEADS + head) * TILE_ROWS + row
        split_maximum = tl.load(partial_stats + partial, real, -1e30, cache_modifier=".cg")
        split_total = tl.load(partial_stats + stats_size + partial, real, 0.0, cache_modifier=".cg")
        split_result = tl.load(partial_output + partial[:, None] * HEAD_DIM + dim[None, :], real[:, None], 0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, split_maximum)
        decay = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(split_maximum - new_maximum)
        total = total * decay + split_total * weight
        result = result * decay[:, None] + split_result * weight[:, None]
        maximum = new_maximum
    query_row = (query_start + (row_begin + row) // GROUP).to(tl.int64)
    query_head = head * GROUP + (row_begin + row) % GROUP
    pointer = output + ((query_row * KV_HEADS * GROUP + query_head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(pointer, result / tl.maximum(total, 1e-30)[:, None], real[:, None])
