"""Matrix products of 2 to 128 rows in Triton: the weight streams through the matrix units, its first part before the kernel before has ended."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.early import PREFETCH_ALIGNMENT, announce, prefetch, wait
from specwire.engine.kernels.options import Product, ProductTuning, padded_rows


class ProductScratch:
    """Partial sums of split products, shared by all that run one after the other.

    Args:
        products: whose partial sums are to fit.
        device: the weights'.
    """

    def __init__(self, products: Iterable[Product], device: torch.device | str) -> None:
        blocks = [(p, triton.cdiv(p.out_features, p.tuning.features)) for p in products if p.tuning.splits > 1]
        most = max((count * p.tuning.splits * p.tuning.features * p.rows for p, count in blocks), default=0)
        self.partial = torch.empty(most, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max((count for _, count in blocks), default=0), dtype=torch.int32, device=device)
        """Zero again after every launch."""


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tuning: ProductTuning, scratch: ProductScratch, *, early: bool = False
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32, in x's dtype. Splits are added up in their order: the same rows give the same bits.

    Args:
        x: [T, in_features] with 1 to 128 rows, contiguous.
        weight: [out_features, in_features], contiguous; no kernel writes it.
        bias: [out_features] or None.
        tuning: how the work is cut.
        scratch: made for a product of this size, if it is split.
        early: the first part of the weight is prefetched before the kernel launched before has ended.
    """
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    rows, num_blocks = padded_rows(num_rows), triton.cdiv(out_features, tuning.features)
    assert 1 <= num_rows <= 128, num_rows
    assert weight.shape[1] == in_features, (weight.shape, x.shape)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    if tuning.splits > 1:
        num_partial = num_blocks * tuning.splits * tuning.features * rows
        assert num_blocks <= len(scratch.arrived), f"{num_blocks} blocks, scratch for {len(scratch.arrived)}"
        assert num_partial <= len(scratch.partial), f"{num_partial} sums, scratch for {len(scratch.partial)}"
    is_aligned = weight.data_ptr() % PREFETCH_ALIGNMENT == 0 and in_features * weight.element_size() % PREFETCH_ALIGNMENT == 0
    output = x.new_empty(num_rows, out_features)
    skinny_linear_kernel[(num_blocks, tuning.splits)](
        x, weight, bias, output, scratch.partial, scratch.arrived, num_rows, out_features,
        IN=in_features,
        SPAN=triton.cdiv(triton.cdiv(in_features, tuning.depth), tuning.splits) * tuning.depth,
        BIAS=bias is not None,
        ROWS=rows, FEATURES=tuning.features, DEPTH=tuning.depth, SPLITS=tuning.splits, STAGES=tuning.num_stages,
        PREFETCH=tuning.prefetch_depth if early and is_aligned else 0,
        EARLY=early, num_warps=tuning.num_warps, launch_pdl=early,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    x,
    weight,
    bias,
    output,
    partial,
    arrived,
    num_rows,
    out_features,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (blocks of output features, splits). The weight is the operand that comes in tiles of 64, the rows are the narrow one."""
    announce(EARLY)
    block = tl.program_id(0)
    split = tl.program_id(1)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    inside = feature < out_features
    row = tl.arange(0, ROWS)
    real = row < num_rows
    begin = split * SPAN
    end = tl.minimum(begin + SPAN, IN)
    weights = weight + feature.to(tl.int64)[:, None] * IN
    if PREFETCH > 0:
        # Pieces that all threads share; a piece past the end of the split is left out, as SPAN is a multiple of DEPTH.
        piece = begin + tl.arange(0, PREFETCH // DEPTH) * DEPTH
        num_bytes = tl.minimum(DEPTH, end - piece) * (weight.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(weights + piece[None, :], num_bytes[None, :], inside[:, None] & (piece < end)[None, :])
    wait(EARLY)
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        column = start + tl.arange(0, DEPTH)
        mask = inside[:, None]
        x_mask = real[:, None]
        if IN % DEPTH:
            mask = mask & (column < end)[None, :]
            x_mask = x_mask & (column < end)[None, :]
        tile = tl.load(weights + column[None, :], mask, 0.0, eviction_policy="evict_first")
        rows = tl.load(x + row[:, None] * IN + column[None, :], x_mask, 0.0)
        total = tl.dot(tile, tl.trans(rows), total, input_precision="ieee")
    if SPLITS == 1:
        store_product(total, output, bias, feature, inside, row, real, out_features, BIAS)
    else:
        numbers = tl.arange(0, FEATURES)[:, None] * ROWS + row[None, :]
        size = FEATURES * ROWS
        parts = partial + block.to(tl.int64) * SPLITS * size + numbers
        tl.store(parts + split * size, total)
        # Every thread's part is written before one of them counts this program as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + block, 0)
            # Past the first-level cache: other multiprocessors wrote this.
            total = tl.load(parts, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(parts + other * size, cache_modifier=".cg")
            store_product(total, output, bias, feature, inside, row, real, out_features, BIAS)


@triton.jit
def store_product(total, output, bias, feature, inside, row, real, out_features, BIAS: tl.constexpr):
    """total: [features, rows]; output: [rows, features]."""
    if BIAS:
        total += tl.load(bias + feature, inside, 0.0).to(tl.float32)[:, None]
    tl.store(output + row[None, :] * out_features + feature[:, None], total, inside[:, None] & real[None, :])
