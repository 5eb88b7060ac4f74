"""The torch twins of the kernels in `layer_ops`, for any device."""

import torch
import torch.nn.functional as F

from specwire.engine.kv_cache import KVCache


def add_rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to the residual, in place, and returns the sum's RMS norm times the weight.

    Args:
        x: [T, hidden_size]; None adds nothing.
        residual: [T, hidden_size], contiguous.
        weight: [hidden_size].
        eps: added to the mean square.
    """
    if x is not None:
        residual += x
    return F.rms_norm(residual, residual.shape[-1:], weight, eps)


def rotary_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_kv: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotates queries and keys (each head's halves against each other) and stores keys and values in the cache.

    Args:
        qkv: [T, H + 2 KV, head_dim], contiguous: queries, keys, values. Queries are rotated in place; what it then holds for keys is undefined.
        cos, signed_sin: [max_position_embeddings, head_dim] as `rope_table` gives them, in any dtype.
        positions: [T].
        slot_mapping: [T], block * block_size + offset.
        layer_kv: one layer [num_blocks, block_size, 2, KV, head_dim], contiguous.
        q_norm, k_norm: [head_dim] weights of an RMS norm of each query and key head before the rotation; None = no norm.
        eps: of that norm.

    Returns:
        The queries, a view [T, H, head_dim] of qkv.
    """
    head_dim, num_kv_heads = qkv.shape[2], layer_kv.shape[3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    num_rotated = num_heads + num_kv_heads
    query_key = qkv[:, :num_rotated]
    if q_norm is not None and k_norm is not None:
        parts = ((qkv[:, :num_heads], q_norm), (qkv[:, num_heads:num_rotated], k_norm))
        query_key = torch.cat([F.rms_norm(part, (head_dim,), weight, eps) for part, weight in parts], 1)
    cos_rows, sin_rows = cos.index_select(0, positions)[:, None].to(qkv.dtype), signed_sin.index_select(0, positions)[:, None].to(qkv.dtype)
    torch.addcmul(query_key * cos_rows, query_key.roll(head_dim // 2, -1), sin_rows, out=qkv[:, :num_rotated])
    KVCache.write(layer_kv, slot_mapping, qkv[:, num_heads:])
    return qkv[:, :num_heads]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * width] -> silu(gate) * up [T, width]; gates first."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
