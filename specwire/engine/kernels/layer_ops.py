"""The small operators between a layer's matrix products, in Triton; their torch twins are in `layer_ops_torch`.

All read and write the model's dtype, compute in float32 and round once. `early`, which the twins do not have: the kernel starts before the one
before it has ended (see `early`).
"""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.options import KernelOptions

_NORM_NUMBERS_PER_WARP = 512
_SILU_BLOCK = 1024


def add_rms_norm(x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, early: bool = False) -> torch.Tensor:
    """See `layer_ops_torch.add_rms_norm`."""
    num_tokens, hidden_size = residual.shape
    assert residual.is_contiguous(), residual.stride()
    assert x is None or (x.is_contiguous() and x.shape == residual.shape), (x.shape, residual.shape)
    output = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden_size)
    add_rms_norm_kernel[(num_tokens,)](
        residual if x is None else x,
        residual,
        weight,
        output,
        hidden_size,
        eps,
        ADD=x is not None,
        BLOCK=block,
        EARLY=early,
        num_warps=min(max(block // _NORM_NUMBERS_PER_WARP, 1), 8),
        launch_pdl=early,
    )
    return output


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
    *,
    early: bool = False,
) -> torch.Tensor:
    """See `layer_ops_torch.rotary_kv_write`."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = layer_kv.shape[3]
    num_heads = num_all_heads - 2 * num_kv_heads
    assert qkv.is_contiguous(), qkv.stride()
    assert layer_kv.is_contiguous(), layer_kv.stride()
    assert (q_norm is None) == (k_norm is None), "queries and keys are normalised both or not at all"
    heads_per_program = 8
    rotary_kv_write_kernel[(triton.cdiv(num_all_heads, heads_per_program), num_tokens)](
        qkv,
        cos,
        signed_sin,
        positions,
        slot_mapping,
        layer_kv,
        q_norm,
        k_norm,
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NORM=q_norm is not None,
        PROGRAM_HEADS=heads_per_program,
        EARLY=early,
        num_warps=2,
        launch_pdl=early,
    )
    return qkv[:, :num_heads]


def silu_mul(gate_up: torch.Tensor, *, early: bool = False) -> torch.Tensor:
    """See `layer_ops_torch.silu_mul`."""
    num_tokens, width = gate_up.shape
    assert gate_up.is_contiguous(), gate_up.stride()
    output = gate_up.new_empty(num_tokens, width // 2)
    silu_mul_kernel[(triton.cdiv(width // 2, _SILU_BLOCK), num_tokens)](
        gate_up, output, width // 2, BLOCK=_SILU_BLOCK, EARLY=early, num_warps=4, launch_pdl=early
    )
    return output


class TritonLayerOps:
    """The operators as options have them."""

    def __init__(self, options: KernelOptions) -> None:
        self._options = options

    def add_rms_norm(self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `layer_ops_torch.add_rms_norm`."""
        return add_rms_norm(x, residual, weight, eps, early=self._options.is_early(len(residual)))

    def rotary_kv_write(
        self,
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
        early = self._options.is_early(len(qkv))
        return rotary_kv_write(qkv, cos, signed_sin, positions, slot_mapping, layer_kv, q_norm, k_norm, eps, early=early)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `layer_ops_torch.silu_mul`."""
        return silu_mul(gate_up, early=self._options.is_early(len(gate_up)))


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    output,
    hidden_size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (tokens)."""
    announce(EARLY)
    column = tl.arange(0, BLOCK)
    real = column < hidden_size
    offset = tl.program_id(0).to(tl.int64) * hidden_size + column
    factor = tl.load(weight + column, real, 0.0).to(tl.float32)
    wait(EARLY)
    value = tl.load(residual + offset, real, 0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(x + offset, real, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(residual + offset, value, real)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden_size + eps)
    tl.store(output + offset, value * scale * factor, real)


@triton.jit
def rotary_kv_write_kernel(
    qkv,
    cos,
    signed_sin,
    positions,
    slot_mapping,
    layer_kv,
    q_norm,
    k_norm,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (groups of heads, tokens). A thread has both halves of a head: the rotation needs no exchange."""
    announce(EARLY)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    head = tl.program_id(0) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)
    real = (head < HEADS + 2 * KV_HEADS)[:, None]
    is_query = (head < HEADS)[:, None]
    rotated = (head < HEADS + KV_HEADS)[:, None]
    dim = tl.arange(0, HALF)
    angle = position.to(tl.int64) * HEAD_DIM + dim
    cos_row = tl.load(cos + angle).to(tl.float32)[None, :]
    sin_row = tl.load(signed_sin + angle + HALF).to(tl.float32)[None, :]
    wait(EARLY)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM + dim[None, :]
    raw_low = tl.load(source, real, 0.0)
    raw_high = tl.load(source + HALF, real, 0.0)
    low = raw_low.to(tl.float32)
    high = raw_high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        factor_low = tl.where(is_query, tl.load(q_norm + dim)[None, :], tl.load(k_norm + dim)[None, :]).to(tl.float32)
        factor_high = tl.where(is_query, tl.load(q_norm + HALF + dim)[None, :], tl.load(k_norm + HALF + dim)[None, :]).to(tl.float32)
        low = low * scale * factor_low
        high = high * scale * factor_high
    # Values pass as they are, not through arithmetic.
    new_low = tl.where(rotated, (low * cos_row - high * sin_row).to(raw_low.dtype), raw_low)
    new_high = tl.where(rotated, (high * cos_row + low * sin_row).to(raw_high.dtype), raw_high)
    tl.store(source, new_low, is_query)
    tl.store(source + HALF, new_high, is_query)
    # Keys, then values, as a slot of the cache holds them.
    target = layer_kv + (slot * (2 * KV_HEADS) + (head - HEADS))[:, None] * HEAD_DIM + dim[None, :]
    is_kv = real & (head >= HEADS)[:, None]
    tl.store(target, new_low, is_kv)
    tl.store(target + HALF, new_high, is_kv)


@triton.jit
def silu_mul_kernel(
    gate_up,
    output,
    width,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (blocks of columns, tokens)."""
    announce(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    token = tl.program_id(1).to(tl.int64)
    wait(EARLY)
    gate = tl.load(gate_up + token * 2 * width + column, real, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, real, 0.0).to(tl.float32)
    tl.store(output + token * width + column, gate / (1.0 + tl.exp(-gate)) * up, real)
