"""The operators of the engine: Triton's kernels for tensors on a CUDA device, their torch twins elsewhere. Only here is it decided which."""

from typing import TYPE_CHECKING

import torch

from specwire.engine.kernels import gumbel_argmax_torch, layer_ops_torch, ragged_attention
from specwire.engine.kernels.ragged_attention import AttentionPlan
from specwire.engine.sampling.philox import Stream

if TYPE_CHECKING:
    from specwire.engine.kernels.work_list import DeviceAttentionPlan

# Triton is imported where it is used: a CPU engine starts without it, and some systems have none.


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: "AttentionPlan | DeviceAttentionPlan | None" = None,
) -> torch.Tensor:
    """See `ragged_attention.ragged_attention`. A plan on the device takes the kernel; rows of no request are then undefined."""
    if plan is None or isinstance(plan, AttentionPlan):
        return ragged_attention.ragged_attention(query, kv_cache, cu_seqlens_q, seq_lens, block_tables, scale, plan=plan)
    from specwire.engine.kernels.paged_attention import paged_attention

    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    paged_attention(query, kv_cache, block_tables, scale, plan, output)
    return output


def add_rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `layer_ops_torch.add_rms_norm`."""
    if residual.is_cuda:
        from specwire.engine.kernels import layer_ops

        return layer_ops.add_rms_norm(x, residual, weight, eps)
    return layer_ops_torch.add_rms_norm(x, residual, weight, eps)


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
    """See `layer_ops_torch.rotary_kv_write`."""
    if qkv.is_cuda:
        from specwire.engine.kernels import layer_ops

        return layer_ops.rotary_kv_write(qkv, cos, signed_sin, positions, slot_mapping, layer_kv, q_norm, k_norm, eps)
    return layer_ops_torch.rotary_kv_write(qkv, cos, signed_sin, positions, slot_mapping, layer_kv, q_norm, k_norm, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `layer_ops_torch.silu_mul`."""
    if gate_up.is_cuda:
        from specwire.engine.kernels import layer_ops

        return layer_ops.silu_mul(gate_up)
    return layer_ops_torch.silu_mul(gate_up)


def gumbel_argmax(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, choices: torch.Tensor, stream: Stream
) -> torch.Tensor:
    """See `gumbel_argmax_torch.gumbel_argmax`."""
    if logits.is_cuda:
        from specwire.engine.kernels import gumbel_argmax as kernel

        return kernel.gumbel_argmax(logits, temperatures, keys, indices, choices, stream)
    return gumbel_argmax_torch.gumbel_argmax(logits, temperatures, keys, indices, choices, stream)
