"""Causal attention of ragged queries over paged KV: the torch twin, for any device.

Segments with few queries (decode and verify rows) run together in padded calls, sorted into groups of similar length, their query heads
that share a key/value head packed into the query dimension; long prefill chunks run one by one in slices of queries. KV is gathered
token by token, padding with the sequence's own first token: a row reads nothing but its own sequence, so numbers gone bad (NaN) in one
sequence can't reach another through a reused block.

Lengths are padded to fixed steps (`_padded_length`): CPU matrix products sum in an order that depends on the length, so that without it a
token's logits would depend, in their last bits, on which drafts and which other rows are computed with it.
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
    """One call of scaled_dot_product_attention over S padded rows of Q queries and L positions each, G query heads to a KV head."""

    query_rows: torch.Tensor | slice  # [S * Q] token rows of the queries (padding repeats a row), or the slice that they are
    output_rows: torch.Tensor | None  # [n] token rows to write; None where query_rows has no padding
    output_index: torch.Tensor | None  # [n] which of the S * Q results they take
    slots: torch.Tensor  # [S * L] slots of keys and values
    num_rows: int  # S
    num_queries: int  # Q
    num_positions: int  # L
    packed: bool  # query heads packed into the query dimension
    mask: torch.Tensor | None  # additive, [S, 1, Q * G, L] if packed, else [1, 1, Q, L]; None where every position is attended to


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
        slots = slot_table(block_tables.cpu().numpy(), kv_cache.shape[1])
        group = query.shape[1] // kv_cache.shape[3]
        starts, lengths = cu_seqlens_q.cpu().numpy().astype(np.int64), seq_lens.cpu().numpy().astype(np.int64)
        plan = plan_attention(starts, lengths, slots, group, query.device, query.dtype)
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
    kv = kv_cache.flatten(0, 1).index_select(0, call.slots).view(rows, positions, 2, num_kv_heads, head_dim)
    key, value = kv.permute(2, 0, 3, 1, 4).unbind()  # [S, KV, L, D]
    if not call.packed:
        heads_first = picked.transpose(0, 1)[None]  # [1, H, Q, D]
        result = F.scaled_dot_product_attention(heads_first, key, value, attn_mask=call.mask, scale=scale, enable_gqa=group > 1)
        return result[0].transpose(0, 1).contiguous()
    if queries == 1:  # as below, without operators that have nothing to do
        result = F.scaled_dot_product_attention(picked.view(rows, num_kv_heads, group, head_dim), key, value, attn_mask=call.mask, scale=scale)
        return result.reshape(rows, num_heads, head_dim)
    packed = picked.view(rows, queries, num_kv_heads, group, head_dim).transpose(1, 2).reshape(rows, num_kv_heads, queries * group, head_dim)
    result = F.scaled_dot_product_attention(packed, key, value, attn_mask=call.mask, scale=scale)  # [S, KV, Q * G, D]
    return result.view(rows, num_kv_heads, queries, group, head_dim).transpose(1, 2).reshape(rows * queries, num_heads, head_dim)


def slot_table(block_tables: np.ndarray, block_size: int) -> np.ndarray:
    """block_tables [S, max_blocks] -> slot of every position [S, max_blocks * block_size] int64."""
    return (block_tables.astype(np.int64)[:, :, None] * block_size + np.arange(block_size)).reshape(len(block_tables), -1)


def plan_attention(
    cu_seqlens_q: np.ndarray,
    seq_lens: np.ndarray,
    slots: np.ndarray,
    group: int,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    is_causal: bool = True,
) -> AttentionPlan:
    """Cuts a batch into calls.

    Args:
        cu_seqlens_q: [S + 1] int64, on the host like all arrays here.
        seq_lens: [S] int64.
        slots: what `slot_table` gave.
        group: query heads to a key/value head.
        device, dtype: the queries'.
        is_causal: else every query of a segment sees all of its positions.
    """
    query_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    is_packed = query_lens <= MAX_PACKED_QUERIES
    calls = [_packed_call(rows, cu_seqlens_q, seq_lens, slots, group, device, dtype, is_causal) for rows in _groups(is_packed.nonzero()[0], seq_lens)]
    for row in (~is_packed).nonzero()[0].tolist():
        first, last = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        calls.extend(_prefill_calls(first, last, slots[row, : seq_lens[row]], device, dtype, is_causal))
    return AttentionPlan(tuple(calls))


def _groups(rows: np.ndarray, seq_lens: np.ndarray) -> Iterator[np.ndarray]:
    """Groups rows so that none is padded by more than a quarter of the group's length or 128 positions, whichever is more."""
    remaining = rows[seq_lens[rows].argsort()[::-1]]  # longest first
    while len(remaining):
        lengths = seq_lens[remaining]
        count = int((lengths >= lengths[0] - max(128, lengths[0] // 4)).sum())
        yield np.sort(remaining[:count])
        remaining = remaining[count:]


def _packed_call(
    rows: np.ndarray,
    cu_seqlens_q: np.ndarray,
    seq_lens: np.ndarray,
    slots: np.ndarray,
    group: int,
    device: torch.device | str,
    dtype: torch.dtype,
    is_causal: bool,
) -> AttentionCall:
    first, lengths = cu_seqlens_q[rows], seq_lens[rows]
    query_lens = cu_seqlens_q[rows + 1] - first
    num_queries, num_positions = int(query_lens.max()), _padded_length(int(lengths.max()))
    positions = np.arange(num_positions)
    picked = np.where(positions < lengths[:, None], _first_columns(slots[rows], num_positions), slots[rows, :1])  # [S, L]
    mask = None
    if num_queries > 1 or (lengths != num_positions).any():
        first_ends = lengths - (query_lens if is_causal else 1)
        last_visible = np.minimum(first_ends[:, None] + np.arange(num_queries), lengths[:, None] - 1)  # [S, Q]
        mask = _mask(positions <= last_visible.repeat(group, axis=1)[:, :, None], device, dtype)

    query_rows: torch.Tensor | slice
    output_rows = output_index = None
    num_rows = len(rows)
    if (query_lens == num_queries).all() and rows[-1] - rows[0] == num_rows - 1:
        query_rows = slice(int(first[0]), int(first[0]) + num_rows * num_queries)
    else:
        offsets = np.arange(num_queries)
        real = offsets < query_lens[:, None]  # [S, Q]
        index = np.where(real, first[:, None] + offsets, first[:, None])
        query_rows = torch.from_numpy(index.reshape(-1)).to(device)
        output_rows = torch.from_numpy(index[real]).to(device)
        output_index = torch.from_numpy(real.reshape(-1).nonzero()[0]).to(device)
    return AttentionCall(
        query_rows=query_rows,
        output_rows=output_rows,
        output_index=output_index,
        slots=torch.from_numpy(picked.reshape(-1)).to(device),
        num_rows=num_rows,
        num_queries=num_queries,
        num_positions=num_positions,
        packed=True,
        mask=mask,
    )


def _prefill_calls(
    first: int, last: int, slots: np.ndarray, device: torch.device | str, dtype: torch.dtype, is_causal: bool
) -> Iterator[AttentionCall]:
    """Calls for the token rows first .. last of one segment whose positions have the given slots."""
    seq_len = len(slots)
    start = seq_len - (last - first)
    padded = np.full(_padded_length(seq_len), slots[0])
    padded[:seq_len] = slots
    all_slots = torch.from_numpy(padded).to(device)
    for begin in range(first, last, MAX_QUERY_SLICE):
        end = min(begin + MAX_QUERY_SLICE, last)
        num_positions = _padded_length(start + end - first if is_causal else seq_len)
        last_visible = np.arange(start + begin - first, start + end - first) if is_causal else np.full(end - begin, seq_len - 1)
        visible = np.arange(num_positions) <= last_visible[:, None]  # [Q, L]
        yield AttentionCall(
            query_rows=slice(begin, end),
            output_rows=None,
            output_index=None,
            slots=all_slots[:num_positions],
            num_rows=1,
            num_queries=end - begin,
            num_positions=num_positions,
            packed=False,
            mask=_mask(visible[None], device, dtype),
        )


def _padded_length(num_positions: int) -> int:
    """The next length at which sums agree bit for bit with those of every longer one.

    PyTorch's CPU attention takes positions in blocks of 512. In a last block of up to 256 positions, multiples of 32 agree; longer ones
    are cut differently by the matrix products inside, unless they are whole (measured in float32 and bfloat16).
    """
    whole, rest = divmod(num_positions, 512)
    return 512 * whole + (-(-rest // 32) * 32 if rest <= 256 else 512)


def _first_columns(array: np.ndarray, count: int) -> np.ndarray:
    """The first `count` columns, repeating the last one where there are fewer."""
    missing = count - array.shape[1]
    return array[:, :count] if missing <= 0 else np.pad(array, ((0, 0), (0, missing)), mode="edge")


def _mask(visible: np.ndarray, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """visible [S, Q, L] -> additive mask [S, 1, Q, L]."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return mask[:, None].to(device)
