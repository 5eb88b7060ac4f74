"""Products of up to six rows with 16 features of a weight of few bits, in 512-bit integer dot products (AVX-512 VNNI).

A row is one or two digits of 8 bits for each number (`kernels.split_groups`), so that every sum of 32 products is exact; sums of those are
float32, always in the same order, whatever else is computed. Digits of six rows lie together, group by group.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specwire.engine.cpu.intrinsics import F32, I32, I64, call, operation, vector
from specwire.engine.cpu.vectors import F32S, I32S, ZERO, accumulators, all_lanes, fma, load, prefetch, rows, splat_at, store, times

MAX_ROWS = 6
GROUP = 32
GROUP_BYTES = 4 * 64 + 64
"""Of 16 features: 32 codes each, then 16 scales and 16 minimums in float16."""
ROWS_BYTES = MAX_ROWS * GROUP
"""Of a group of up to six rows' digits: those of the next group lie so far behind."""
NUMBERS_BYTES = 2 * 4 * MAX_ROWS
"""Of a group of up to six rows: sums, then units, in float32."""
_BASE_BITS = 7
_AHEAD_BYTES = 1600
_MASK = all_lanes(0x0F0F0F0F)


def _dot(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, digits: ir.Value) -> ir.Value:
    """Adds products of four unsigned and four signed bytes to each lane."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32S, total, codes, digits)


def _half(builder: ir.IRBuilder, base: ir.Value, offset: int) -> ir.Value:
    return builder.fpext(load(builder, base, offset, vector(ir.HalfType())), F32S)


def _q4(num_rows: int) -> Any:
    def emit(
        b: ir.IRBuilder, weight: ir.Value, groups: ir.Value, high: ir.Value, low: ir.Value, numbers: ir.Value, fine: ir.Value, out: ir.Value,
        out_stride: ir.Value,
    ) -> ir.Value:  # fmt: skip
        totals, products = accumulators(b, num_rows), accumulators(b, num_rows)
        with cgutils.for_range(b, groups) as loop:
            group = loop.index
            base, at = b.add(weight, times(b, group, GROUP_BYTES)), times(b, group, ROWS_BYTES)
            _prefetch(b, base, GROUP_BYTES)
            highs = _dots(b, base, b.add(high, at), num_rows)
            for product, sum_ in zip(products, highs, strict=True):
                b.store(b.sitofp(sum_, F32S), product)
            word = load(b, fine, times(b, b.lshr(group, ir.Constant(I64, 6)), 8), I64)
            bit = b.and_(b.lshr(word, b.and_(group, ir.Constant(I64, 63))), ir.Constant(I64, 1))
            with b.if_then(b.icmp_signed("!=", bit, ir.Constant(I64, 0)), likely=False):
                for product, of_high, of_low in zip(products, highs, _dots(b, base, b.add(low, at), num_rows), strict=True):
                    exact = b.add(b.shl(of_high, all_lanes(_BASE_BITS)), of_low)
                    b.store(b.fmul(b.sitofp(exact, F32S), ir.Constant(F32S, [2.0**-_BASE_BITS] * 16)), product)
            scale, minimum, own = _half(b, base, 256), _half(b, base, 288), b.add(numbers, times(b, group, NUMBERS_BYTES))
            for row, (total, product) in enumerate(zip(totals, products, strict=True)):
                with_minimum = fma(b, minimum, splat_at(b, own, 4 * row, F32), b.load(total))
                b.store(fma(b, scale, b.fmul(b.load(product), splat_at(b, own, NUMBERS_BYTES // 2 + 4 * row, F32)), with_minimum), total)
        for total, address in zip(totals, rows(b, out, out_stride, num_rows), strict=True):
            store(b, b.load(total), address)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 8, emit)


def _prefetch(b: ir.IRBuilder, base: ir.Value, num_bytes: int) -> None:
    """Asks for the weight of a later group: the machine's own guesses come late for a cache that is large, but far."""
    for line in range(num_bytes // 64):
        prefetch(b, b.add(base, ir.Constant(I64, _AHEAD_BYTES + 64 * line)))


def _dots(b: ir.IRBuilder, codes: ir.Value, digits: ir.Value, num_rows: int) -> list[ir.Value]:
    """A group's codes times its digits, for each row."""
    sums = [ZERO] * num_rows
    for part in range(4):
        packed = load(b, codes, 64 * part, I32S)
        for half, four in enumerate((b.and_(packed, _MASK), b.and_(b.lshr(packed, all_lanes(4)), _MASK))):
            at = 8 * part + 4 * half
            sums = [_dot(b, sum_, four, splat_at(b, digits, GROUP * row + at, I32)) for row, sum_ in enumerate(sums)]
    return sums


def _q8(num_rows: int) -> Any:
    """Weight of 16 features: width / 4 times 64 codes (plus 128), 16 scales in float32, 16 numbers in float32 for each exact column."""

    def emit(
        b: ir.IRBuilder, weight: ir.Value, groups: ir.Value, high: ir.Value, low: ir.Value, corrections: ir.Value, exact: ir.Value,
        units: ir.Value, out: ir.Value, out_stride: ir.Value, num_exact: ir.Value,
    ) -> ir.Value:  # fmt: skip
        highs, lows = accumulators(b, num_rows, I32S), accumulators(b, num_rows, I32S)
        with cgutils.for_range(b, groups) as loop:
            base, at = b.add(weight, times(b, loop.index, 64 * GROUP // 4)), times(b, loop.index, ROWS_BYTES)
            _prefetch(b, base, 64 * GROUP // 4)
            for quad in range(GROUP // 4):
                codes = load(b, base, 64 * quad, I32S)
                for sums, digits in ((highs, b.add(high, at)), (lows, b.add(low, at))):
                    for row, sum_ in enumerate(sums):
                        b.store(_dot(b, b.load(sum_), codes, splat_at(b, digits, GROUP * row + 4 * quad, I32)), sum_)
        tail = b.add(weight, times(b, groups, 64 * GROUP // 4))
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
        for total, address in zip(totals, rows(b, out, out_stride, num_rows), strict=True):
            store(b, b.load(total), address)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 10, emit)


q4_1, q4_2, q4_3, q4_4, q4_5, q4_6 = (_q4(count) for count in range(1, MAX_ROWS + 1))
q8_1, q8_2, q8_3, q8_4, q8_5, q8_6 = (_q8(count) for count in range(1, MAX_ROWS + 1))
