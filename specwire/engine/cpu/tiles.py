"""Products of up to six rows with 16 features of a weight of few bits, in 512-bit integer dot products (AVX-512 VNNI).

A row is two digits of 8 bits for each number (`kernels.split_digits`), so that every sum of 32 products is exact; sums of those are float32,
always in the same order, whatever else is computed.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specwire.engine.cpu.intrinsics import F32, I32, I64, call, operation, vector
from specwire.engine.cpu.vectors import F32S, I32S, ZERO, accumulators, all_lanes, fma, load, rows, splat_at, store, times

MAX_ROWS = 6
GROUP = 32
GROUP_BYTES = 4 * 64 + 64
"""Of 16 features: 32 codes each, then 16 scales and 16 minimums in float16."""
_BASE_BITS = 7
_MASK = all_lanes(0x0F0F0F0F)


def _dot(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, digits: ir.Value) -> ir.Value:
    """Adds products of four unsigned and four signed bytes to each lane."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32S, total, codes, digits)


def _half(builder: ir.IRBuilder, base: ir.Value, offset: int) -> ir.Value:
    return builder.fpext(load(builder, base, offset, vector(ir.HalfType())), F32S)


def _q4(num_rows: int) -> Any:
    def emit(
        b: ir.IRBuilder, weight: ir.Value, groups: ir.Value, digits: ir.Value, width: ir.Value, sums: ir.Value, sums_stride: ir.Value,
        units: ir.Value, out: ir.Value, out_stride: ir.Value, unused: ir.Value,
    ) -> ir.Value:  # fmt: skip
        high = rows(b, digits, b.mul(width, ir.Constant(I64, 2)), num_rows)
        low = [b.add(base, width) for base in high]
        row_sums, outs = rows(b, sums, sums_stride, num_rows), rows(b, out, out_stride, num_rows)
        totals = accumulators(b, num_rows)
        with cgutils.for_range(b, groups) as loop:
            base = b.add(weight, times(b, loop.index, GROUP_BYTES))
            at = times(b, loop.index, GROUP)
            highs, lows = [ZERO] * num_rows, [ZERO] * num_rows
            for part in range(4):
                packed = load(b, base, 64 * part, I32S)
                codes = b.and_(packed, _MASK), b.and_(b.lshr(packed, all_lanes(4)), _MASK)
                for half, four in enumerate(codes):
                    position = b.add(at, ir.Constant(I64, 8 * part + 4 * half))
                    for row in range(num_rows):
                        highs[row] = _dot(b, highs[row], four, splat_at(b, high[row], position, I32))
                        lows[row] = _dot(b, lows[row], four, splat_at(b, low[row], position, I32))
            scale, minimum = _half(b, base, 256), _half(b, base, 288)
            for row in range(num_rows):
                exact = b.add(b.shl(highs[row], all_lanes(_BASE_BITS)), lows[row])
                row_sum = splat_at(b, row_sums[row], times(b, loop.index, 4), F32)
                total = fma(b, minimum, row_sum, b.load(totals[row]))
                b.store(fma(b, scale, b.sitofp(exact, F32S), total), totals[row])
        _finish(b, totals, units, outs)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 10, emit)


def _q8(num_rows: int) -> Any:
    """Weight of 16 features: width / 4 times 64 codes (plus 128), 16 scales in float32, 16 numbers in float32 for each exact column."""

    def emit(
        b: ir.IRBuilder, weight: ir.Value, quads: ir.Value, digits: ir.Value, width: ir.Value, corrections: ir.Value, exact: ir.Value,
        units: ir.Value, out: ir.Value, out_stride: ir.Value, num_exact: ir.Value,
    ) -> ir.Value:  # fmt: skip
        high = rows(b, digits, b.mul(width, ir.Constant(I64, 2)), num_rows)
        low = [b.add(base, width) for base in high]
        outs = rows(b, out, out_stride, num_rows)
        highs, lows = accumulators(b, num_rows, I32S), accumulators(b, num_rows, I32S)
        with cgutils.for_range(b, quads) as loop:
            codes = load(b, weight, times(b, loop.index, 64), I32S)
            at = times(b, loop.index, 4)
            for row in range(num_rows):
                b.store(_dot(b, b.load(highs[row]), codes, splat_at(b, high[row], at, I32)), highs[row])
                b.store(_dot(b, b.load(lows[row]), codes, splat_at(b, low[row], at, I32)), lows[row])
        tail = b.add(weight, times(b, quads, 64))
        scale = load(b, tail, 0, F32S)
        totals = accumulators(b, num_rows)
        base = ir.Constant(F32S, [float(1 << _BASE_BITS)] * 16)
        for row in range(num_rows):
            parts = []
            for digit, slots in enumerate((highs, lows)):
                correction = splat_at(b, corrections, 8 * row + 4 * digit, I32)
                parts.append(b.sitofp(b.sub(b.load(slots[row]), correction), F32S))
            unit = splat_at(b, units, 4 * row, F32)
            b.store(b.fmul(b.fmul(fma(b, parts[0], base, parts[1]), unit), scale), totals[row])
        columns = b.add(tail, ir.Constant(I64, 64))
        exact_rows = rows(b, exact, b.mul(num_exact, ir.Constant(I64, 4)), num_rows)
        with cgutils.for_range(b, num_exact) as loop:
            column = load(b, columns, times(b, loop.index, 64), F32S)
            for row in range(num_rows):
                value = splat_at(b, exact_rows[row], times(b, loop.index, 4), F32)
                b.store(fma(b, column, value, b.load(totals[row])), totals[row])
        _finish(b, totals, None, outs)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 10, emit)


def _finish(b: ir.IRBuilder, totals: list[ir.Value], units: ir.Value | None, outs: list[ir.Value]) -> None:
    for row, (slot, out) in enumerate(zip(totals, outs, strict=True)):
        value = b.load(slot)
        if units is not None:
            value = b.fmul(value, splat_at(b, units, 4 * row, F32))
        store(b, value, out)


q4_1, q4_2, q4_3, q4_4, q4_5, q4_6 = (_q4(count) for count in range(1, MAX_ROWS + 1))
q8_1, q8_2, q8_3, q8_4, q8_5, q8_6 = (_q8(count) for count in range(1, MAX_ROWS + 1))
