"""Attention of consecutive tokens of a sequence, for the query heads that share a head of keys and values."""

import numpy as np
from numba import carray, njit

from specwire.engine.cpu.attention_tiles import (
    MAX_QUERIES,
    TILE,
    ask,
    scores_1,
    scores_2,
    scores_3,
    scores_4,
    scores_5,
    scores_6,
    transpose_keys,
    values_1,
    values_2,
    values_3,
    values_4,
    values_5,
    values_6,
)
from specwire.engine.cpu.elements import exp_below
from specwire.engine.cpu.intrinsics import bits_of_f32, f32_of_bits, i64_at
from specwire.engine.cpu.kernels import ABSOLUTE, OPTIONS, f32

_BLOCKS_AHEAD = 2
"""Whose keys are asked for: a key's line in a far cache takes longer than a block's scores."""


@njit(**OPTIONS)
def attend(
    queries, query_stride, layer_kv, table, block_size, first_position, num_rows, head, num_kv_heads, group, dim, scale, scratch, out, out_stride
):
    """Tokens at positions first_position .. first_position + num_rows - 1, each over all positions up to its own.

    Args:
        queries: address of float32 [num_rows, group, dim], rows query_stride bytes apart.
        layer_kv: bfloat16 [blocks, block_size, 2, num_kv_heads, dim].
        table: address of the sequence's blocks, int64.
        head: of keys and values.
        group: query heads of a head.
        scratch: address of float32 [`num_scratch_floats`].
        out: address of float32 [num_rows, group, dim], rows out_stride bytes apart.
    """
    num_queries, num_positions = num_rows * group, first_position + num_rows
    num_blocks = (num_positions + block_size - 1) // block_size
    blocks = carray(i64_at(table), (num_blocks,))
    stride, parts, row_bytes = 4 * num_kv_heads * dim, dim // 16, 4 * group * dim
    base = layer_kv + 2 * head * dim
    keys = scratch
    scaled = keys + 4 * TILE * dim
    sums = scaled + 4 * num_queries * dim
    scores = sums + 4 * num_queries * dim
    scores_stride = 4 * TILE * ((num_positions + TILE - 1) // TILE + 1)
    for row in range(num_rows):
        x, y = f32(queries + query_stride * row, group * dim), f32(scaled + row_bytes * row, group * dim)
        for i in range(group * dim):
            y[i] = x[i] * scale
    for block in range(num_blocks):
        later = base + blocks[min(block + _BLOCKS_AHEAD, num_blocks - 1)] * block_size * stride
        ask(later, stride, block_size, 2 * dim)
        ask(base + blocks[block] * block_size * stride + 2 * num_kv_heads * dim, stride, block_size, 2 * dim)
        for first in range(block * block_size, min((block + 1) * block_size, num_positions), TILE):
            count = min(TILE, (block + 1) * block_size - first, num_positions - first)
            transpose_keys(base + (blocks[block] * block_size + first - block * block_size) * stride, stride, count, parts, keys)
            _score(scaled, num_queries, keys, dim, scores + 4 * first, scores_stride)
    for query in range(num_queries):
        _weigh(scores + scores_stride * query, first_position + query // group + 1)
    total = f32(sums, num_queries * dim)
    for i in range(num_queries * dim):
        total[i] = np.float32(0.0)
    for block in range(num_blocks):
        for first in range(block * block_size, min((block + 1) * block_size, num_positions), TILE):
            count = min(TILE, (block + 1) * block_size - first, num_positions - first)
            values = base + (blocks[block] * block_size + first - block * block_size) * stride + 2 * num_kv_heads * dim
            if first + count <= first_position + 1:
                _add(values, stride, count, scores + 4 * first, scores_stride, num_queries, parts, sums)
            else:  # later tokens' values are none of an earlier token's business, even if its weight were 0
                for row in range(num_rows):
                    own = min(count, first_position + row + 1 - first)
                    _add(values, stride, own, scores + scores_stride * group * row + 4 * first, scores_stride, group, parts, sums + row_bytes * row)
    for row in range(num_rows):
        x, y = f32(sums + row_bytes * row, group * dim), f32(out + out_stride * row, group * dim)
        for i in range(group * dim):
            y[i] = x[i]


def num_scratch_floats(num_queries: int, num_positions: int, dim: int) -> int:
    """What `attend` needs."""
    return dim * (TILE + 2 * num_queries) + num_queries * TILE * ((num_positions + TILE - 1) // TILE + 1)


@njit(**OPTIONS)
def _ordered(bits):
    """Bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & ABSOLUTE)


@njit(**OPTIONS)
def _weigh(scores, num_positions):
    """Softmax of scores [num_positions] in place; a tile that they end in is overwritten."""
    weights = f32(scores, num_positions)
    order = np.int32(-0x80000000)
    for position in range(num_positions):
        order = max(order, _ordered(bits_of_f32(weights[position])))
    largest = f32_of_bits(_ordered(order))
    for first in range(0, num_positions, TILE):
        exp_below(scores + 4 * first, largest)
    total = np.float32(0.0)
    for position in range(num_positions):
        total += weights[position]
    inverse = np.float32(1.0) / total
    for position in range(num_positions):
        weights[position] *= inverse


@njit(**OPTIONS)
def _score(queries, num_queries, keys, dim, scores, stride):
    for first in range(0, num_queries, MAX_QUERIES):
        count, of, to = min(MAX_QUERIES, num_queries - first), queries + 4 * dim * first, scores + stride * first
        if count == 1:
            scores_1(of, keys, dim, to, stride)
        elif count == 2:
            scores_2(of, keys, dim, to, stride)
        elif count == 3:
            scores_3(of, keys, dim, to, stride)
        elif count == 4:
            scores_4(of, keys, dim, to, stride)
        elif count == 5:
            scores_5(of, keys, dim, to, stride)
        else:
            scores_6(of, keys, dim, to, stride)


@njit(**OPTIONS)
def _add(values, value_stride, num_values, weights, stride, num_queries, parts, sums):
    for first in range(0, num_queries, MAX_QUERIES):
        count, of, to = min(MAX_QUERIES, num_queries - first), weights + stride * first, sums + 64 * parts * first
        if count == 1:
            values_1(values, value_stride, num_values, of, stride, parts, to)
        elif count == 2:
            values_2(values, value_stride, num_values, of, stride, parts, to)
        elif count == 3:
            values_3(values, value_stride, num_values, of, stride, parts, to)
        elif count == 4:
            values_4(values, value_stride, num_values, of, stride, parts, to)
        elif count == 5:
            values_5(values, value_stride, num_values, of, stride, parts, to)
        else:
            values_6(values, value_stride, num_values, of, stride, parts, to)
