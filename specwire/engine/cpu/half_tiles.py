"""Products of up to twelve rows with 64 features of a weight, in 512-bit multiplications of float16 (AVX512-FP16).

Those are four times as many a cycle as products of bfloat16 pairs (AVX512-BF16) and twice as many as in float32, where a CPU has no
AMX. bfloat16 weights are exact in float16 once each feature's largest number is brought between 1 and 2; rows are rounded to float16, which
has three bits more than bfloat16. 32 products are summed in float16, and those sums in float32, always in the same order, whatever else is
computed. `half_kernels.halve` sees to it that no sum of 32 leaves the range.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specwire.engine.cpu.intrinsics import F32, I32, I64, call, operation, vector
from specwire.engine.cpu.vectors import F32S, all_lanes, load, prefetch, rows, splat, splat_at, store, times

MAX_ROWS = 12
GROUP = 32
"""Numbers of a row whose products are summed in float16."""
FEATURES = 32
"""Of a block: a vector. A tile takes two blocks."""
TILE_BYTES = 4 * 2 * FEATURES
"""Of a row of results."""
_HALVES = vector(ir.HalfType(), FEATURES)
_QUARTER = vector(ir.HalfType())
_AHEAD_BYTES = 2048
_VECTORS = 4
"""Of float32, in a row of results."""


def block_bytes(width: Any) -> Any:
    """Of 32 features: width times 32 numbers in float16, then 32 scales in float32."""
    return 2 * FEATURES * width + 4 * FEATURES


def _product(num_rows: int) -> Any:
    def emit(
        b: ir.IRBuilder, first: ir.Value, second: ir.Value, groups: ir.Value, halves: ir.Value, group_stride: ir.Value, units: ir.Value,
        out: ir.Value,
    ) -> ir.Value:  # fmt: skip
        outs = rows(b, out, ir.Constant(I64, TILE_BYTES), num_rows)
        for address in outs:
            for part in range(_VECTORS):
                store(b, ir.Constant(F32S, [0.0] * 16), b.add(address, ir.Constant(I64, 64 * part)))
        with cgutils.for_range(b, groups) as loop:
            sums = _sums(b, [b.add(block, times(b, loop.index, 2 * FEATURES * GROUP)) for block in (first, second)],
                         b.add(halves, b.mul(loop.index, group_stride)), num_rows)  # fmt: skip
            for address, of_row in zip(outs, sums, strict=True):
                for part, quarter in enumerate(quarter for sum_ in of_row for quarter in _quarters(b, sum_)):
                    at = b.add(address, ir.Constant(I64, 64 * part))
                    store(b, b.fadd(load(b, at, 0, F32S), quarter), at)
        tails = [b.add(block, times(b, groups, 2 * FEATURES * GROUP)) for block in (first, second)]
        scales = [load(b, tail, 64 * part, F32S) for tail in tails for part in range(2)]
        for row, address in enumerate(outs):
            unit = splat_at(b, units, 4 * row, F32)
            for part, scale in enumerate(scales):
                at = b.add(address, ir.Constant(I64, 64 * part))
                store(b, b.fmul(b.fmul(load(b, at, 0, F32S), scale), unit), at)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 7, emit)


def _sums(b: ir.IRBuilder, blocks: list[ir.Value], halves: ir.Value, num_rows: int) -> list[list[ir.Value]]:
    """A group's products in float16, for each row and block."""
    totals = [[cgutils.alloca_once(b, _HALVES) for _ in blocks] for _ in range(num_rows)]
    for total in (total for of_row in totals for total in of_row):
        b.store(ir.Constant(_HALVES, [0.0] * FEATURES), total)
    with cgutils.for_range(b, ir.Constant(I64, GROUP)) as loop:
        at = times(b, loop.index, 2 * FEATURES)
        weights = [load(b, block, at, _HALVES) for block in blocks]
        for block in blocks:
            prefetch(b, b.add(b.add(block, at), ir.Constant(I64, _AHEAD_BYTES)))
        column = b.add(halves, times(b, loop.index, 4))
        for row, of_row in enumerate(totals):
            number = b.bitcast(splat_at(b, column, 4 * GROUP * row, I32), _HALVES)
            for weight, total in zip(weights, of_row, strict=True):
                b.store(call(b, "llvm.fma.v32f16", _HALVES, number, weight, b.load(total)), total)
    return [[b.load(total) for total in of_row] for of_row in totals]


def _quarters(b: ir.IRBuilder, halves: ir.Value) -> list[ir.Value]:
    """32 float16 as float32."""
    undefined = ir.Constant(_HALVES, ir.Undefined)
    parts = (b.shuffle_vector(halves, undefined, ir.Constant(vector(I32), list(range(first, first + 16)))) for first in (0, 16))
    return [b.fpext(part, F32S) for part in parts]


def _halve_16(b: ir.IRBuilder, values: ir.Value, factor: ir.Value, out: ir.Value) -> ir.Value:
    scaled = b.fmul(load(b, values, 0, F32S), splat(b, factor))
    bits = b.zext(b.bitcast(b.fptrunc(scaled, _QUARTER), vector(ir.IntType(16))), vector(I32))
    store(b, b.or_(bits, b.shl(bits, all_lanes(16))), out)
    return ir.Constant(I64, 0)


halve_16 = operation(types.int64, (types.int64, types.float32, types.int64), _halve_16)
"""Addresses of 16 float32, which are multiplied by a factor, and of 16 times two equal float16."""
half_1, half_2, half_3, half_4, half_5, half_6, half_7, half_8, half_9, half_10, half_11, half_12 = (_product(n) for n in range(1, MAX_ROWS + 1))
"""Addresses of two blocks of 32 features, how many groups of 32 numbers a row has, address of the first row's halves, bytes from a group's to the
next group's, address of float32 units [n], address of results, float32 [n, 64]."""
