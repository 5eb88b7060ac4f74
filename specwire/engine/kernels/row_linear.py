"""Matrix products of a single row in Triton: they only stream the weight, and small ones take half of the time that cuBLAS's do."""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.options import RowCut

_PLAIN_CUT, _EARLY_CUT = RowCut(block=8, depth=512), RowCut()


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, early: bool = False, early_cut: RowCut = _EARLY_CUT
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32, in x's dtype.

    Args:
        x: [1, in_features], contiguous.
        weight: [out_features, in_features], contiguous; no kernel writes it.
        bias: [out_features] or None.
        early: the first part of the weight is on its way before the kernel launched before has ended.
        early_cut: how the work is cut if it starts early.
    """
    in_features, out_features = x.shape[1], weight.shape[0]
    assert x.shape == (1, weight.shape[1]), (x.shape, weight.shape)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    cut = early_cut if early else _PLAIN_CUT
    output = x.new_empty(1, out_features)
    row_linear_kernel[(triton.cdiv(out_features, cut.block),)](
        x, weight, bias, output, out_features,
        IN=in_features, BIAS=bias is not None, BLOCK=cut.block, DEPTH=cut.depth, EARLY=early, num_warps=cut.num_warps, launch_pdl=early,
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
    tl.store(output + feature, result, inside)
