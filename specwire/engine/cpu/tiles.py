"""Products of up to six rows with 16 features of a weight of few bits, in 512-bit integer dot products (AVX-512 VNNI).

A row is two digits of 8 bits for each number (`kernels.split_digits`), so that every sum of 32 products is exact; sums of those are float32,
always in the same order, whatever else is computed.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specwire.engine.cpu.intrinsics import F32, I16, I32, I64, call, operation, pointer, vector

MAX_ROWS = 6
GROUP = 32
GROUP_BYTES = 4 * 64 + 64
"""Of 16 features: 32 codes each, then 16 scales and 16 minimums in float16."""
_BASE_BITS = 7
_F32S, _I32S = vector(F32), vector(I32)
_MASK = ir.Constant(_I32S, [0x0F0F0F0F] * 16)
_ZERO = ir.Constant(_I32S, [0] * 16)


def _load(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
    step = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    value = builder.load(pointer(builder, builder.add(base, step), kind))
    value.align = 1
    return value


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    kind = vector(value.type)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _ZERO)


def _dot(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, digits: ir.Value) -> ir.Value:
    """Adds products of four unsigned and four signed bytes to each lane."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _I32S, total, codes, digits)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call(builder, "llvm.fma.v16f32", _F32S, a, b, c)


def _half(builder: ir.IRBuilder, base: ir.Value, offset: int) -> ir.Value:
    return builder.fpext(_load(builder, base, offset, vector(ir.HalfType())), _F32S)


def _times(builder: ir.IRBuilder, value: ir.Value, factor: int) -> ir.Value:
    return builder.mul(value, ir.Constant(I64, factor))


def _rows(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
    return [builder.add(base, _times(builder, stride, row)) for row in range(count)]


def _accumulators(builder: ir.IRBuilder, count: int) -> list[ir.Value]:
    slots = [cgutils.alloca_once(builder, _F32S) for _ in range(count)]
    for slot in slots:
        builder.store(ir.Constant(_F32S, [0.0] * 16), slot)
    return slots


def _q4(num_rows: int) -> Any:
    def emit(
        b: ir.IRBuilder, weight: ir.Value, groups: ir.Value, digits: ir.Value, width: ir.Value, sums: ir.Value, sums_stride: ir.Value,
        units: ir.Value, out: ir.Value, out_stride: ir.Value, unused: ir.Value,
    ) -> ir.Value:  # fmt: skip
        high = _rows(b, digits, b.mul(width, ir.Constant(I64, 2)), num_rows)
        low = [b.add(base, width) for base in high]
        row_sums, outs = _rows(b, sums, sums_stride, num_rows), _rows(b, out, out_stride, num_rows)
        totals = _accumulators(b, num_rows)
        with cgutils.for_range(b, groups) as loop:
            base = b.add(weight, _times(b, loop.index, GROUP_BYTES))
            at = _times(b, loop.index, GROUP)
            highs, lows = [_ZERO] * num_rows, [_ZERO] * num_rows
            for part in range(4):
                packed = _load(b, base, 64 * part, _I32S)
                codes = b.and_(packed, _MASK), b.and_(b.lshr(packed, ir.Constant(_I32S, [4] * 16)), _MASK)
                for half, four in enumerate(codes):
                    position = b.add(at, ir.Constant(I64, 8 * part + 4 * half))
                    for row in range(num_rows):
                        highs[row] = _dot(b, highs[row], four, _splat(b, _load(b, high[row], position, I32)))
                        lows[row] = _dot(b, lows[row], four, _splat(b, _load(b, low[row], position, I32)))
            scale, minimum = _half(b, base, 256), _half(b, base, 288)
            for row in range(num_rows):
                exact = b.add(b.shl(highs[row], ir.Constant(_I32S, [_BASE_BITS] * 16)), lows[row])
                row_sum = _splat(b, _load(b, row_sums[row], _times(b, loop.index, 4), F32))
                total = _fma(b, minimum, row_sum, b.load(totals[row]))
                b.store(_fma(b, scale, b.sitofp(exact, _F32S), total), totals[row])
        _finish(b, totals, units, outs)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 10, emit)


def _q8(num_rows: int) -> Any:
    """Weight of 16 features: width / 4 times 64 codes (plus 128), 16 scales in float32, 16 numbers in float32 for each exact column."""

    def emit(
        b: ir.IRBuilder, weight: ir.Value, quads: ir.Value, digits: ir.Value, width: ir.Value, corrections: ir.Value, exact: ir.Value,
        units: ir.Value, out: ir.Value, out_stride: ir.Value, num_exact: ir.Value,
    ) -> ir.Value:  # fmt: skip
        high = _rows(b, digits, b.mul(width, ir.Constant(I64, 2)), num_rows)
        low = [b.add(base, width) for base in high]
        outs = _rows(b, out, out_stride, num_rows)
        highs, lows = ([cgutils.alloca_once(b, _I32S) for _ in range(num_rows)] for _ in range(2))
        for slot in (*highs, *lows):
            b.store(_ZERO, slot)
        with cgutils.for_range(b, quads) as loop:
            codes = _load(b, weight, _times(b, loop.index, 64), _I32S)
            at = _times(b, loop.index, 4)
            for row in range(num_rows):
                b.store(_dot(b, b.load(highs[row]), codes, _splat(b, _load(b, high[row], at, I32))), highs[row])
                b.store(_dot(b, b.load(lows[row]), codes, _splat(b, _load(b, low[row], at, I32))), lows[row])
        tail = b.add(weight, _times(b, quads, 64))
        scale = _load(b, tail, 0, _F32S)
        totals = _accumulators(b, num_rows)
        base = ir.Constant(_F32S, [float(1 << _BASE_BITS)] * 16)
        for row in range(num_rows):
            parts = []
            for digit, slots in enumerate((highs, lows)):
                correction = _splat(b, _load(b, corrections, 8 * row + 4 * digit, I32))
                parts.append(b.sitofp(b.sub(b.load(slots[row]), correction), _F32S))
            unit = _splat(b, _load(b, units, 4 * row, F32))
            b.store(b.fmul(b.fmul(_fma(b, parts[0], base, parts[1]), unit), scale), totals[row])
        columns = b.add(tail, ir.Constant(I64, 64))
        exact_rows = _rows(b, exact, b.mul(num_exact, ir.Constant(I64, 4)), num_rows)
        with cgutils.for_range(b, num_exact) as loop:
            column = _load(b, columns, _times(b, loop.index, 64), _F32S)
            for row in range(num_rows):
                value = _splat(b, _load(b, exact_rows[row], _times(b, loop.index, 4), F32))
                b.store(_fma(b, column, value, b.load(totals[row])), totals[row])
        _finish(b, totals, None, outs)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 10, emit)


def _finish(b: ir.IRBuilder, totals: list[ir.Value], units: ir.Value | None, outs: list[ir.Value]) -> None:
    for row, (slot, out) in enumerate(zip(totals, outs, strict=True)):
        value = b.load(slot)
        if units is not None:
            value = b.fmul(value, _splat(b, _load(b, units, 4 * row, F32)))
        b.store(value, pointer(b, out, _F32S)).align = 4


q4_1, q4_2, q4_3, q4_4, q4_5, q4_6 = (_q4(count) for count in range(1, MAX_ROWS + 1))
q8_1, q8_2, q8_3, q8_4, q8_5, q8_6 = (_q8(count) for count in range(1, MAX_ROWS + 1))


def _bf16(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    numbers = b.zext(_load(b, address, 0, vector(I16)), _I32S)
    return b.bitcast(b.shl(numbers, ir.Constant(_I32S, [16] * 16)), _F32S)


def _score(b: ir.IRBuilder, query: ir.Value, keys: ir.Value, stride: ir.Value, count: ir.Value, parts: ir.Value, scores: ir.Value) -> ir.Value:
    kind = ir.FunctionType(F32, [F32, _F32S])
    reduce = cgutils.get_or_insert_function(b.module, kind, "llvm.vector.reduce.fadd.v16f32")
    total = cgutils.alloca_once(b, _F32S)
    with cgutils.for_range(b, count) as positions:
        b.store(ir.Constant(_F32S, [0.0] * 16), total)
        key = b.add(keys, b.mul(positions.index, stride))
        with cgutils.for_range(b, parts) as loop:
            numbers = _bf16(b, b.add(key, _times(b, loop.index, 32)))
            b.store(_fma(b, _load(b, query, _times(b, loop.index, 64), _F32S), numbers, b.load(total)), total)
        score = b.call(reduce, [ir.Constant(F32, 0.0), b.load(total)], fastmath=("reassoc",))
        b.store(score, pointer(b, b.add(scores, _times(b, positions.index, 4)), F32))
    return ir.Constant(I64, 0)


def _add_values(b: ir.IRBuilder, values: ir.Value, stride: ir.Value, count: ir.Value, parts: ir.Value, weights: ir.Value, out: ir.Value) -> ir.Value:
    total = cgutils.alloca_once(b, _F32S)
    with cgutils.for_range(b, parts) as loop:
        target = pointer(b, b.add(out, _times(b, loop.index, 64)), _F32S)
        first = b.load(target)
        first.align = 4
        b.store(first, total)
        column = b.add(values, _times(b, loop.index, 32))
        with cgutils.for_range(b, count) as positions:
            numbers = _bf16(b, b.add(column, b.mul(positions.index, stride)))
            weight = _splat(b, _load(b, weights, _times(b, positions.index, 4), F32))
            b.store(_fma(b, weight, numbers, b.load(total)), total)
        b.store(b.load(total), target).align = 4
    return ir.Constant(I64, 0)


score_keys = operation(types.int64, (types.int64,) * 6, _score)
"""Addresses of a float32 query and of bfloat16 keys, bytes between keys, their number, how many times 16 numbers they have, address of scores."""
add_values = operation(types.int64, (types.int64,) * 6, _add_values)
"""Adds values, each times its weight: addresses of values, bytes between them, their number, how many times 16 numbers, addresses of weights, out."""
