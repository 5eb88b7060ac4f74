"""Causal attention of ragged queries over paged KV: the torch twin, for any device.

Segments with few queries (decode and verify rows) run together in padded calls, sorted into groups of similar length; long prefill
chunks run one by one in slices of queries. Query heads that share a key/value head are packed into the query dimension, so KV is never
expanded. KV is gathered token by token, padding with the sequence's own first token: a row reads nothing but its own sequence, so
numbers gone bad (NaN) in one sequence can't reach another through a reused block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

MAX_PACKED_QUERIES = 32
"""Segments of at most this many queries are padded and computed together."""
MAX_QUERY_SLICE = 256
"""Longer segments are cut into slices of this many queries: bounds the mask, and each slice reads only what it may attend to."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of scaled_dot_product_attention over S padded rows of Q queries and L positions each."""

    query_rows: torch.Tensor | slice  # [S * Q] token rows of the queries (padding repeats a row), or the slice that they are
    output_rows: torch.Tensor | None  # [n] token rows to write; None where query_rows has no padding
    output_index: torch.Tensor | None  # [n] which of the S * Q results they take
    slots: torch.Tensor  # [S * L] slots of keys and values
    num_rows: int  # S
    num_queries: int  # Q
    num_positions: int  # L
    mask: torch.Tensor | None  # [S, 1, Q, 1, L] additive; None where every position is attended to


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors of a batch, made once per forward pass and used by every layer."""

    calls: tuple[AttentionCall, ...]


def ragged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Query i of a segment with q queries and seq_len positions attends to positions 0 .. seq_len - q + i.

    Args:
        query: [T, num_heads, head_dim].
        kv_cache: one layer [num_blocks, block_size, 2, num_kv_heads, head_dim]; the segments' own keys and values are written already.
        cu_seqlens_q: [S + 1] int32.
        seq_lens: [S] int32.
        block_tables: [S, max_blocks] int32.
        scale: factor on the scores.
        plan: what `plan_attention` made of the same batch; None makes it here (and waits for the device).

    Returns:
        [T, num_heads, head_dim], contiguous.
    """
    if plan is None:
        plan = plan_attention(
            cu_seqlens_q.cpu().numpy(), seq_lens.cpu().numpy(), block_tables.cpu().numpy(), kv_cache.shape[1], query.device, query.dtype
        )
    calls = plan.calls
    if len(calls) == 1 and calls[0].output_rows is None:
        return _attend(query, kv_cache, calls[0], scale)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for call in calls:
        result = _attend(query, kv_cache, call, scale)
        if call.output_rows is not None and call.output_index is not None:
            output.index_copy_(0, call.output_rows, result.index_select(0, call.output_index))
        else:
            assert isinstance(call.query_rows, slice), call.query_rows
            output[call.query_rows] = result
    return output


def _attend(query: torch.Tensor, kv_cache: torch.Tensor, call: AttentionCall, scale: float) -> torch.Tensor:
    """Returns [S * Q, num_heads, head_dim]."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    rows, queries, positions = call.num_rows, call.num_queries, call.num_positions
    picked = query[call.query_rows] if isinstance(call.query_rows, slice) else query.index_select(0, call.query_rows)
    packed = picked.view(rows, queries, num_kv_heads, group, head_dim).transpose(1, 2).reshape(rows, num_kv_heads, queries * group, head_dim)
    kv = kv_cache.flatten(0, 1).index_select(0, call.slots).view(rows, positions, 2, num_kv_heads, head_dim)
    key, value = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [S, KV, L, D]
    mask = None if call.mask is None else call.mask.expand(rows, 1, queries, group, positions).reshape(rows, 1, queries * group, positions)
    result = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)  # [S, KV, Q * G, D]
    unpacked = result.view(rows, num_kv_heads, queries, group, head_dim).transpose(1, 2)
    return unpacked.reshape(rows * queries, num_heads, head_dim)


def plan_attention(
    cu_seqlens_q: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Cuts a batch into calls. Arguments as in `ragged_attention`, on the host; `dtype` is the queries'."""
    query_lens = np.diff(cu_seqlens_q)
    packed = [row for row in range(len(seq_lens)) if query_lens[row] <= MAX_PACKED_QUERIES]
    calls = []
    for rows in _groups(packed, seq_lens):
        calls.append(_packed_call(rows, cu_seqlens_q, seq_lens, block_tables, block_size, device, dtype))
    for row in np.flatnonzero(query_lens > MAX_PACKED_QUERIES):
        calls.extend(_prefill_calls(int(row), cu_seqlens_q, seq_lens, block_tables, block_size, device, dtype))
    return AttentionPlan(tuple(calls))


def _groups(rows: list[int], seq_lens: np.ndarray) -> Iterator[list[int]]:
    """Groups rows so that none is padded by more than a quarter of the group's length or 128 positions, whichever is more."""
    group: list[int] = []
    longest = 0
    for row in sorted(rows, key=lambda r: -int(seq_lens[r])):
        if group and longest - seq_lens[row] > max(128, longest // 4):
            yield sorted(group)
            group = []
        if not group:
            longest = int(seq_lens[row])
        group.append(row)
    if group:
        yield sorted(group)


def _slots(block_table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    return block_table[positions // block_size].astype(np.int64) * block_size + positions % block_size


def _packed_call(
    rows: list[int],
    cu_seqlens_q: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> AttentionCall:
    first, lengths = cu_seqlens_q[rows], seq_lens[rows]
    query_lens = cu_seqlens_q[np.array(rows) + 1] - first
    num_queries, num_positions = int(query_lens.max()), int(lengths.max())
    offsets, positions = np.arange(num_queries), np.arange(num_positions)
    real = offsets < query_lens[:, None]  # [S, Q]
    # Padded positions read the row's own position 0; the mask hides them.
    position_index = np.where(positions < lengths[:, None], positions, 0)  # [S, L]
    slots = np.stack([_slots(block_tables[row], position_index[i], block_size) for i, row in enumerate(rows)])
    last_position = np.where(real, (lengths - query_lens)[:, None] + offsets, 0)  # [S, Q]
    visible = positions <= last_position[:, :, None]  # [S, Q, L]

    query_rows: torch.Tensor | slice
    output_rows = output_index = None
    if bool(real.all()) and rows == list(range(rows[0], rows[0] + len(rows))):
        query_rows = slice(int(first[0]), int(first[0]) + len(rows) * num_queries)
    else:
        index = np.where(real, first[:, None] + offsets, first[:, None])
        query_rows = torch.from_numpy(index.reshape(-1)).to(device)
        output_rows = torch.from_numpy(index[real]).to(device)
        output_index = torch.from_numpy(np.flatnonzero(real.reshape(-1))).to(device)
    return AttentionCall(
        query_rows=query_rows,
        output_rows=output_rows,
        output_index=output_index,
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        num_rows=len(rows),
        num_queries=num_queries,
        num_positions=num_positions,
        mask=None if bool(visible.all()) else _mask(visible, device, dtype),
    )


def _prefill_calls(
    row: int,
    cu_seqlens_q: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Iterator[AttentionCall]:
    first, last = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
    start = int(seq_lens[row]) - (last - first)
    slots = torch.from_numpy(_slots(block_tables[row], np.arange(int(seq_lens[row])), block_size)).to(device)
    for begin in range(first, last, MAX_QUERY_SLICE):
        end = min(begin + MAX_QUERY_SLICE, last)
        num_positions = start + end - first
        visible = np.arange(num_positions) <= np.arange(start + begin - first, num_positions)[:, None]  # [Q, L]
        yield AttentionCall(
            query_rows=slice(begin, end),
            output_rows=None,
            output_index=None,
            slots=slots[:num_positions],
            num_rows=1,
            num_queries=end - begin,
            num_positions=num_positions,
            mask=_mask(visible[None], device, dtype),
        )


def _mask(visible: np.ndarray, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """visible [S, Q, L] -> additive mask [S, 1, Q, 1, L]."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return mask[:, None, :, None].to(device)
