"""Matrix products of one or two rows that only stream the weight, in Triton: a program reads the rows once, then takes many features.

Norm, residual sum and SiLU-mul may be inside. Twins are the separate kernels, whose numbers come out: what they round is rounded here.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import announce, wait
from specwire.engine.kernels.options import MAX_STREAMED_ROWS, RowTuning


def row_stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tuning: RowTuning,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gates: bool = False,
    residual: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32, in x's dtype.

    Args:
        x: [R, in_features] with one or two rows, contiguous.
        weight: [out_features, in_features], contiguous; no kernel writes it. If it gates: rows of the gates, then those of the values.
        bias: [out_features] or None.
        tuning: how the work is cut.
        norm: [in_features], weight of an RMS norm that x goes through first, as in `add_rms_norm`; None: x as it is.
        eps: of the norm.
        gates: the output is silu(gates) * values, half as wide, as in `silu_mul`.
        residual: [R, out_features], contiguous: the rounded product is added to it, and it is what is returned.
        output: [R, out_features], contiguous, of any floating dtype: what is written and returned instead. Not with a residual.
        early: the first part of the weight is on its way before the kernel launched before has ended.
    """
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert 1 <= num_rows <= MAX_STREAMED_ROWS, x.shape
    assert weight.shape[1] == in_features, (weight.shape, x.shape)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert not (gates and bias is not None), "a bias of gates and values is not added"
    out_features //= 2 if gates else 1
    target = residual if output is None else output
    assert output is None or residual is None, "a residual is added in its place"
    if target is None:
        target = x.new_empty(num_rows, out_features)
    assert target.is_contiguous(), target.stride()
    assert target.shape == (num_rows, out_features), (target.shape, num_rows, out_features)
    columns = triton.next_power_of_2(in_features)
    block = max(tuning.numbers // columns // (2 if gates else 1), 1)
    row_stream_kernel[(min(triton.cdiv(out_features, block), tuning.num_programs),)](
        x, norm, eps, weight, bias, target, out_features,
        IN=in_features, COLUMNS=columns, ROWS=num_rows, NORM=norm is not None, BIAS=bias is not None, GATES=gates, ADD=residual is not None,
        BLOCK=block, EARLY=early, num_warps=tuning.num_warps, launch_pdl=early,
    )  # fmt: skip
    return target


@triton.jit(do_not_specialize=["out_features"])
def row_stream_kernel(
    x,
    norm,
    eps,
    weight,
    bias,
    output,
    out_features,
    IN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Any grid. The tiles of the next features are loaded before those at hand are multiplied, the first ones before the rows are there."""
    announce(EARLY)
    column = tl.arange(0, COLUMNS)
    first = tl.program_id(0) * BLOCK
    values = weight + out_features.to(tl.int64) * IN  # if it gates
    tile = load_tile(weight, first, out_features, column, IN, COLUMNS, BLOCK)
    value_tile = tile
    if GATES:
        value_tile = load_tile(values, first, out_features, column, IN, COLUMNS, BLOCK)
    factor = column.to(tl.float32)
    if NORM:
        factor = tl.load(norm + column, column < IN, 0.0).to(tl.float32)
    wait(EARLY)
    row = load_row(x, column, factor, eps, IN, NORM)
    other_row = row
    if ROWS == 2:
        other_row = load_row(x + IN, column, factor, eps, IN, NORM)
    for begin in range(first, out_features, tl.num_programs(0) * BLOCK):
        following = begin + tl.num_programs(0) * BLOCK
        next_tile = load_tile(weight, following, out_features, column, IN, COLUMNS, BLOCK)
        next_value_tile = next_tile
        if GATES:
            next_value_tile = load_tile(values, following, out_features, column, IN, COLUMNS, BLOCK)
        feature = begin + tl.arange(0, BLOCK)
        store_features(tile, value_tile, row, bias, output, feature, out_features, BIAS, GATES, ADD)
        if ROWS == 2:
            store_features(tile, value_tile, other_row, bias, output + out_features, feature, out_features, BIAS, GATES, ADD)
        tile = next_tile
        value_tile = next_value_tile


@triton.jit
def load_tile(weight, first, out_features, column, IN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, COLUMNS] of a weight, 0 outside."""
    feature = first + tl.arange(0, BLOCK)
    mask = (feature < out_features)[:, None]
    if IN != COLUMNS:
        mask = mask & (column < IN)[None, :]
    return tl.load(weight + feature.to(tl.int64)[:, None] * IN + column[None, :], mask, 0.0, eviction_policy="evict_first")


@triton.jit
def load_row(x, column, factor, eps, IN: tl.constexpr, NORM: tl.constexpr):
    """[COLUMNS] float32, 0 outside; normalised and rounded if it is to be."""
    row = tl.load(x + column, column < IN, 0.0).to(tl.float32)
    if NORM:
        row = row * tl.rsqrt(tl.sum(row * row, 0) / IN + eps) * factor
        row = row.to(x.dtype.element_ty).to(tl.float32)
    return row


@triton.jit
def store_features(tile, value_tile, row, bias, output, feature, out_features, BIAS: tl.constexpr, GATES: tl.constexpr, ADD: tl.constexpr):
    """The features of one row."""
    inside = feature < out_features
    result = tl.sum(tile.to(tl.float32) * row[None, :], 1)
    if GATES:
        gate = result.to(output.dtype.element_ty).to(tl.float32)
        value = tl.sum(value_tile.to(tl.float32) * row[None, :], 1).to(output.dtype.element_ty).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * value
    if BIAS:
        result += tl.load(bias + feature, inside, 0.0).to(tl.float32)
    if ADD:
        result = result.to(output.dtype.element_ty).to(tl.float32) + tl.load(output + feature, inside, 0.0).to(tl.float32)
    tl.store(output + feature, result, inside)
