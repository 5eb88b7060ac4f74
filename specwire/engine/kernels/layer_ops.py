"""The small operators between a layer's matrix products, in Triton; their torch twins are in `layer_ops_torch`.

All read and write the model's dtype, compute in float32 and round once. What they have beyond the twins' arguments: `start`, how the kernel is
launched; `tuning`, its sizes; `stripe`, what programs before its own prefetch of the weight behind it.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.options import KernelOptions, LayerTuning, Start
from specwire.engine.kernels.weight_prefetch import Stripe, prefetch_stripe

_PLAIN, _TUNING, _NO_STRIPE = Start(), LayerTuning(), Stripe()


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    start: Start = _PLAIN,
    tuning: LayerTuning = _TUNING,
    stripe: Stripe = _NO_STRIPE,
) -> torch.Tensor:
    """See `layer_ops_torch.add_rms_norm`."""
    num_tokens, hidden_size = residual.shape
    assert residual.is_contiguous(), residual.stride()
    assert x is None or (x.is_contiguous() and x.shape == residual.shape), (x.shape, residual.shape)
    output = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden_size)
    add_rms_norm_kernel[(stripe.num_lines(1) + num_tokens,)](
        residual if x is None else x,
        residual,
        weight,
        output,
        hidden_size,
        eps,
        ADD=x is not None,
        BLOCK=block,
        EARLY=start.has_instructions,
        **stripe.arguments(1),
        num_warps=min(max(block // tuning.norm_numbers_per_warp, 1), 8),
        launch_pdl=start.is_early,
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
    start: Start = _PLAIN,
    stripe: Stripe = _NO_STRIPE,
) -> torch.Tensor:
    """See `layer_ops_torch.rotary_kv_write`."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = layer_kv.shape[3]
    num_heads = num_all_heads - 2 * num_kv_heads
    assert qkv.is_contiguous(), qkv.stride()
    assert layer_kv.is_contiguous(), layer_kv.stride()
    assert (q_norm is None) == (k_norm is None), "queries and keys are normalised both or not at all"
    heads_per_program = 8
    num_groups = triton.cdiv(num_all_heads, heads_per_program)
    rotary_kv_write_kernel[(num_groups, stripe.num_lines(num_groups) + num_tokens)](
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
        EARLY=start.has_instructions,
        **stripe.arguments(num_groups),
        num_warps=2,
        launch_pdl=start.is_early,
    )
    return qkv[:, :num_heads]


def silu_mul(gate_up: torch.Tensor, *, start: Start = _PLAIN, tuning: LayerTuning = _TUNING, stripe: Stripe = _NO_STRIPE) -> torch.Tensor:
    """See `layer_ops_torch.silu_mul`."""
    num_tokens, width = gate_up.shape
    assert gate_up.is_contiguous(), gate_up.stride()
    output = gate_up.new_empty(num_tokens, width // 2)
    block = tuning.silu_block
    num_blocks = triton.cdiv(width // 2, block)
    silu_mul_kernel[(num_blocks, stripe.num_lines(num_blocks) + num_tokens)](
        gate_up,
        output,
        width // 2,
        BLOCK=block,
        EARLY=start.has_instructions,
        **stripe.arguments(num_blocks),
        num_warps=tuning.silu_warps,
        launch_pdl=start.is_early,
    )
    return output


class TritonLayerOps:
    """The operators as options have them."""

    def __init__(self, options: KernelOptions) -> None:
        self._options = options

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, following: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `layer_ops_torch.add_rms_norm`."""
        num_tokens = len(residual)
        start, stripe = self._options.layer_start(num_tokens), self._stripe(following, num_tokens)
        return add_rms_norm(x, residual, weight, eps, start=start, tuning=self._options.layer, stripe=stripe)

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
        following: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `layer_ops_torch.rotary_kv_write`."""
        start, stripe = self._options.layer_start(len(qkv)), self._stripe(following, len(qkv))
        return rotary_kv_write(qkv, cos, signed_sin, positions, slot_mapping, layer_kv, q_norm, k_norm, eps, start=start, stripe=stripe)

    def silu_mul(self, gate_up: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        """See `layer_ops_torch.silu_mul`."""
        num_tokens = len(gate_up)
        start, stripe = self._options.layer_start(num_tokens), self._stripe(following, num_tokens)
        return silu_mul(gate_up, start=start, tuning=self._options.layer, stripe=stripe)

    def _stripe(self, following: torch.Tensor | None, num_tokens: int) -> Stripe:
        return Stripe.of(following, self._options.stripe_bytes) if num_tokens <= self._options.stripe_tokens else _NO_STRIPE


@triton.jit(do_not_specialize=["following_rows", "stripe_bytes"])
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    output,
    hidden_size,
    eps,
    following,
    following_rows,
    stripe_bytes,
    FOLLOWING_IN: tl.constexpr,
    STRIPE_ROWS: tl.constexpr,
    STRIPE_LINES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (lines of the stripe, then tokens)."""
    announce(EARLY)
    if STRIPE_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if tl.program_id(0) < STRIPE_LINES:
            prefetch_stripe(tl.program_id(0), following, following_rows, stripe_bytes, FOLLOWING_IN, STRIPE_ROWS)
            wait(EARLY)
            return
    column = tl.arange(0, BLOCK)
    real = column < hidden_size
    offset = (tl.program_id(0) - STRIPE_LINES).to(tl.int64) * hidden_size + column
    factor = tl.load(weight + column, real, 0.0).to(tl.float32)
    wait(EARLY)
    value = tl.load(residual + offset, real, 0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(x + offset, real, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(residual + offset, value, real)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden_size + eps)
    tl.store(output + offset, value * scale * factor, real)


@triton.jit(do_not_specialize=["following_rows", "stripe_bytes"])
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
    following,
    following_rows,
    stripe_bytes,
    FOLLOWING_IN: tl.constexpr,
    STRIPE_ROWS: tl.constexpr,
    STRIPE_LINES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (groups of heads, lines of the stripe, then tokens). A thread has both halves of a head: the rotation needs no exchange."""
    announce(EARLY)
    HALF: tl.constexpr = HEAD_DIM // 2
    if STRIPE_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if tl.program_id(1) < STRIPE_LINES:
            program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            prefetch_stripe(program, following, following_rows, stripe_bytes, FOLLOWING_IN, STRIPE_ROWS)
            wait(EARLY)
            return
    token = (tl.program_id(1) - STRIPE_LINES).to(tl.int64)
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


@triton.jit(do_not_specialize=["following_rows", "stripe_bytes"])
def silu_mul_kernel(
    gate_up,
    output,
    width,
    following,
    following_rows,
    stripe_bytes,
    FOLLOWING_IN: tl.constexpr,
    STRIPE_ROWS: tl.constexpr,
    STRIPE_LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (blocks of columns, lines of the stripe, then tokens)."""
    announce(EARLY)
    if STRIPE_LINES > 0:  # noqa: SIM102 (decided when the kernel is compiled)
        if tl.program_id(1) < STRIPE_LINES:
            program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            prefetch_stripe(program, following, following_rows, stripe_bytes, FOLLOWING_IN, STRIPE_ROWS)
            wait(EARLY)
            return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    token = (tl.program_id(1) - STRIPE_LINES).to(tl.int64)
    wait(EARLY)
    gate = tl.load(gate_up + token * 2 * width + column, real, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, real, 0.0).to(tl.float32)
    tl.store(output + token * width + column, gate / (1.0 + tl.exp(-gate)) * up, real)
