"""Matrix products of a single row in Triton: they only stream the weight, and small ones take half of the time that cuBLAS's do."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_EARLY_FROM = 2**22
"""Weights of so many numbers are worth an early start: it costs a launch about 0.7 us, and small ones gain less (docs/performance.md)."""


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32, in x's dtype.

    On a GPU the first part of a large weight is on its way before the kernel launched before has ended.

    Args:
        x: [1, in_features], contiguous.
        weight: [out_features, in_features], contiguous; not written by the kernel launched before.
        bias: [out_features] or None.
    """
    early = x.is_cuda and weight.numel() >= _EARLY_FROM
    block, depth = (4, 1024) if early else (8, 512)
    in_features, out_features = x.shape[1], weight.shape[0]
    assert x.shape == (1, weight.shape[1]), (x.shape, weight.shape)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    output = x.new_empty(1, out_features)
    row_linear_kernel[(triton.cdiv(out_features, block),)](
        x, weight, bias, output, out_features,
        IN=in_features, BIAS=bias is not None, BLOCK=block, DEPTH=depth, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return output


@triton.jit
def row_linear_kernel(
    x, weight, bias, output, out_features, IN: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr
):
    """Grid (blocks of output features). Plain multiplications hide behind the loads."""
    feature = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < out_features
    column = tl.arange(0, DEPTH)
    weights = weight + feature.to(tl.int64)[:, None] * IN
    if EARLY:
        gdc_launch_dependents()
    part = tl.load(weights + column[None, :], inside[:, None] & (column < IN)[None, :], 0.0, eviction_policy="evict_first").to(tl.float32)
    if EARLY:
        gdc_wait()
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
