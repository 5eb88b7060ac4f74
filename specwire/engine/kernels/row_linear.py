"""Matrix products of a single row in Triton: they only stream the weight, and small ones take half of the time that cuBLAS's do."""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.options import Start

_PLAIN = Start()


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    start: Start = _PLAIN,
    residual: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32, in x's dtype.

    If it starts early, the first part of the weight is on its way before the kernel launched before has ended.

    Args:
        x: [1, in_features], contiguous.
        weight: [out_features, in_features], contiguous; no kernel writes it.
        bias: [out_features] or None.
        start: how the kernel is launched.
        residual: [1, out_features], contiguous: the rounded product is added to it, and it is what is returned.
        output: [1, out_features], contiguous, of any floating dtype: what is written and returned instead. Not with a residual.
    """
    in_features, out_features = x.shape[1], weight.shape[0]
    assert x.shape == (1, weight.shape[1]), (x.shape, weight.shape)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert residual is None or (residual.is_contiguous() and residual.shape == (1, out_features)), (residual.shape, out_features)
    assert output is None or (residual is None and output.is_contiguous() and output.shape == (1, out_features)), (output.shape, out_features)
    block, depth = (4, 1024) if start.is_early else (8, 512)
    if output is None:
        output = x.new_empty(1, out_features) if residual is None else residual
    row_linear_kernel[(triton.cdiv(out_features, block),)](
        x, weight, bias, output, out_features,
        IN=in_features, BIAS=bias is not None, ADD=residual is not None, BLOCK=block, DEPTH=depth, EARLY=start.has_instructions, num_warps=4,
        launch_pdl=start.is_early,
    )  # fmt: skip
    return output


@triton.jit
def row_linear_kernel(
    x,
    weight,
    bias,
    output,
    out_features,
    IN: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (blocks of output features). Plain multiplications hide behind the loads."""
    feature = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < out_features
    column = tl.arange(0, DEPTH)
    weights = weight + feature.to(tl.int64)[:, None] * IN
    announce(EARLY)
    part = tl.load(weights + column[None, :], inside[:, None] & (column < IN)[None, :], 0.0, eviction_policy="evict_first").to(tl.float32)
    wait(EARLY)
    total = part * tl.load(x + column, column < IN, 0.0).to(tl.float32)[None, :]
    for start in range(DEPTH, IN, DEPTH):
        # The weight first: the row is exchanged between threads, which wait for it.
        mask = inside[:, None]
        if IN % DEPTH:
            mask = mask & (start + column < IN)[None, :]
        part = tl.load(weights + (start + column)[None, :], mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        total += part * tl.load(x + start + column, start + column < IN, 0.0).to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + feature, inside, 0.0).to(tl.float32)
    if ADD:
        result = result.to(output.dtype.element_ty).to(tl.float32) + tl.load(output + feature, inside, 0.0).to(tl.float32)
    tl.store(output + feature, result, inside)
