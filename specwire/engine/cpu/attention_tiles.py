"""Attention over 16 positions at a time, for up to six queries that share keys and values.

A query's sums have one order, whatever other queries are computed with it.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specwire.engine.cpu.intrinsics import F32, I32, I64, operation, vector
from specwire.engine.cpu.vectors import F32S, I16S, I32S, accumulators, all_lanes, fma, load, prefetch, rows, splat_at, store, times

MAX_QUERIES = 6
TILE = 16
"""Positions."""
_EIGHT = vector(I32, 8)


def _transpose(b: ir.IRBuilder, keys: ir.Value, stride: ir.Value, count: ir.Value, parts: ir.Value, out: ir.Value) -> ir.Value:
    """16 numbers of each key at a time, as pairs: in row p of 8 are keys p and p + 8, each in half of the lanes. Exchanging bits of the row's number
    with those of the lane's brings all keys' pair p into row p."""
    last = b.sub(count, ir.Constant(I64, 1))
    addresses = []
    for key in range(TILE):
        number = ir.Constant(I64, key)
        addresses.append(b.add(keys, b.mul(stride, b.select(b.icmp_signed("<", number, count), number, last))))
    with cgutils.for_range(b, parts) as loop:
        offset = times(b, loop.index, 32)
        halves = [load(b, address, offset, _EIGHT) for address in addresses]
        pairs = [b.shuffle_vector(halves[row], halves[row + 8], _lanes(range(16))) for row in range(8)]
        for bit in (1, 2, 4):
            for row in range(8):
                if not row & bit:
                    first, second = pairs[row], pairs[row | bit]
                    pairs[row] = b.shuffle_vector(first, second, _lanes(16 + (lane ^ bit) if lane & bit else lane for lane in range(16)))
                    pairs[row | bit] = b.shuffle_vector(first, second, _lanes(16 + lane if lane & bit else lane ^ bit for lane in range(16)))
        target = b.add(out, times(b, loop.index, 16 * 64))
        for row, pair in enumerate(pairs):
            store(b, b.bitcast(b.shl(pair, all_lanes(16)), F32S), b.add(target, ir.Constant(I64, 128 * row)))
            store(b, b.bitcast(b.and_(pair, all_lanes(-65536)), F32S), b.add(target, ir.Constant(I64, 128 * row + 64)))
    return ir.Constant(I64, 0)


def _lanes(numbers: Any) -> ir.Value:
    return ir.Constant(I32S, list(numbers))


def _scores(num_queries: int) -> Any:
    def emit(b: ir.IRBuilder, queries: ir.Value, keys: ir.Value, dim: ir.Value, out: ir.Value, out_stride: ir.Value) -> ir.Value:
        bases, outs = rows(b, queries, times(b, dim, 4), num_queries), rows(b, out, out_stride, num_queries)
        totals = accumulators(b, num_queries), accumulators(b, num_queries)  # of even and of odd numbers: twice as many sums under way
        with cgutils.for_range(b, b.lshr(dim, ir.Constant(I64, 1))) as loop:
            for odd in range(2):
                column = load(b, keys, b.add(times(b, loop.index, 128), ir.Constant(I64, 64 * odd)), F32S)
                position = b.add(times(b, loop.index, 8), ir.Constant(I64, 4 * odd))
                for query, base in enumerate(bases):
                    total = totals[odd][query]
                    b.store(fma(b, column, splat_at(b, base, position, F32), b.load(total)), total)
        for query, address in enumerate(outs):
            store(b, b.fadd(b.load(totals[0][query]), b.load(totals[1][query])), address)
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 5, emit)


def _values(num_queries: int) -> Any:
    def emit(
        b: ir.IRBuilder,
        values: ir.Value,
        stride: ir.Value,
        count: ir.Value,
        weights: ir.Value,
        weights_stride: ir.Value,
        parts: ir.Value,
        out: ir.Value,
    ) -> ir.Value:
        bases, outs = rows(b, weights, weights_stride, num_queries), rows(b, out, times(b, parts, 64), num_queries)
        totals = accumulators(b, num_queries)
        with cgutils.for_range(b, parts) as loop:
            for total, address in zip(totals, outs, strict=True):
                b.store(load(b, address, times(b, loop.index, 64), F32S), total)
            column = b.add(values, times(b, loop.index, 32))
            with cgutils.for_range(b, count) as positions:
                bits = b.zext(load(b, column, b.mul(positions.index, stride), I16S), I32S)
                numbers = b.bitcast(b.shl(bits, all_lanes(16)), F32S)
                for total, base in zip(totals, bases, strict=True):
                    b.store(fma(b, splat_at(b, base, times(b, positions.index, 4), F32), numbers, b.load(total)), total)
            for total, address in zip(totals, outs, strict=True):
                store(b, b.load(total), b.add(address, times(b, loop.index, 64)))
        return ir.Constant(I64, 0)

    return operation(types.int64, (types.int64,) * 7, emit)


def _ask(b: ir.IRBuilder, address: ir.Value, stride: ir.Value, count: ir.Value, num_bytes: ir.Value) -> ir.Value:
    with cgutils.for_range(b, count) as position:
        base = b.add(address, b.mul(position.index, stride))
        with cgutils.for_range(b, b.lshr(b.add(num_bytes, ir.Constant(I64, 63)), ir.Constant(I64, 6))) as line:
            prefetch(b, b.add(base, times(b, line.index, 64)))
    return ir.Constant(I64, 0)


ask = operation(types.int64, (types.int64,) * 4, _ask)
"""Asks memory for keys or values: address of the first, bytes between them, their number, bytes of each."""
transpose_keys = operation(types.int64, (types.int64,) * 5, _transpose)
"""Address of bfloat16 keys, bytes between them, their number (1 to 16), how many times 16 numbers they have, address of float32 [numbers, 16]."""
scores_1, scores_2, scores_3, scores_4, scores_5, scores_6 = (_scores(count) for count in range(1, MAX_QUERIES + 1))
"""Addresses of float32 queries [n, dim] and of transposed keys, dim, address of scores [n, 16], bytes between a query's and the next one's."""
values_1, values_2, values_3, values_4, values_5, values_6 = (_values(count) for count in range(1, MAX_QUERIES + 1))
"""Adds values, each times a query's weight: address of bfloat16 values, bytes between them, their number, address of weights [n, number], bytes
between a query's and the next one's, how many times 16 numbers a value has, address of sums [n, numbers]."""
