"""A single row's norm, product and SiLU-mul in one Triton kernel: three launches less where a layer has two of them."""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.options import Start

_PROGRAMS = 528
"""Four for each multiprocessor of an H200: each normalises the row once, and then takes its share of the features."""
_MAX_TILE = 8192
"""Numbers of the weight that a program loads at a time: 64 for each thread."""


def normed_row_linear(
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    start: Start,
    gates: bool = False,
) -> torch.Tensor:
    """The product of a normed row, rounded as `add_rms_norm`, `row_linear` and `silu_mul` round one after the other.

    Args:
        residual: [1, in_features], contiguous.
        norm: [in_features], weight of the RMS norm.
        eps: of the norm.
        weight: [out_features, in_features], contiguous; no kernel writes it. If it gates: rows of the gates, then those of the values.
        bias: [out_features] or None.
        start: how the kernel is launched.
        gates: the output is silu(gates) * values, half as wide.
    """
    (num_rows, in_features), out_features = residual.shape, weight.shape[0]
    assert num_rows == 1, residual.shape
    assert weight.shape[1] == in_features, (weight.shape, residual.shape)
    assert residual.is_contiguous(), residual.stride()
    assert weight.is_contiguous(), weight.stride()
    assert not (gates and bias is not None), "a bias of gates and values is not added"
    if gates:
        out_features //= 2
    columns = triton.next_power_of_2(in_features)
    block = max(_MAX_TILE // columns // (2 if gates else 1), 1)
    output = residual.new_empty(1, out_features)
    normed_row_linear_kernel[(min(triton.cdiv(out_features, block), _PROGRAMS),)](
        residual, norm, eps, weight, bias, output, out_features,
        IN=in_features, COLUMNS=columns, BIAS=bias is not None, GATES=gates, BLOCK=block, EARLY=start.has_instructions, num_warps=4,
        launch_pdl=start.is_early,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["out_features"])
def normed_row_linear_kernel(
    residual,
    norm,
    eps,
    weight,
    bias,
    output,
    out_features,
    IN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Any grid. The tiles of the next features are loaded before those at hand are multiplied, the first ones before the row is there."""
    announce(EARLY)
    column = tl.arange(0, COLUMNS)
    real = column < IN
    first = tl.program_id(0) * BLOCK
    values = weight + out_features.to(tl.int64) * IN  # if it gates
    tile = load_rows(weight, first, out_features, IN, column, BLOCK)
    value_tile = tile
    if GATES:
        value_tile = load_rows(values, first, out_features, IN, column, BLOCK)
    factor = tl.load(norm + column, real, 0.0).to(tl.float32)
    wait(EARLY)
    row = tl.load(residual + column, real, 0.0).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / IN + eps) * factor
    row = row.to(residual.dtype.element_ty).to(tl.float32)
    for begin in range(first, out_features, tl.num_programs(0) * BLOCK):
        following = begin + tl.num_programs(0) * BLOCK
        next_tile = load_rows(weight, following, out_features, IN, column, BLOCK)
        next_value_tile = next_tile
        if GATES:
            next_value_tile = load_rows(values, following, out_features, IN, column, BLOCK)
        feature = begin + tl.arange(0, BLOCK)
        inside = feature < out_features
        result = tl.sum(tile.to(tl.float32) * row[None, :], 1)
        if GATES:
            gate = result.to(output.dtype.element_ty).to(tl.float32)
            value = tl.sum(value_tile.to(tl.float32) * row[None, :], 1).to(output.dtype.element_ty).to(tl.float32)
            result = gate / (1.0 + tl.exp(-gate)) * value
        if BIAS:
            result += tl.load(bias + feature, inside, 0.0).to(tl.float32)
        tl.store(output + feature, result, inside)
        tile = next_tile
        value_tile = next_value_tile


@triton.jit
def load_rows(weight, first, out_features, IN: tl.constexpr, column, BLOCK: tl.constexpr):
    """[BLOCK, columns] of a weight, 0 outside."""
    feature = first + tl.arange(0, BLOCK)
    mask = (feature < out_features)[:, None] & (column < IN)[None, :]
    return tl.load(weight + feature.to(tl.int64)[:, None] * IN + column[None, :], mask, 0.0, eviction_policy="evict_first")
