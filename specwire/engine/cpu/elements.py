"""What compiled loops don't turn into vectors by themselves, or into short ones: digits of a group, exponentials, gates."""

import numpy as np
from llvmlite import ir
from numba import types

from specwire.engine.cpu.intrinsics import F32, I32, I64, call, operation, vector
from specwire.engine.cpu.vectors import F32S, I32S, all_lanes, fma, load, splat, store

LARGEST = 127 * 128 - 1
"""Of numbers in two digits."""
_ABSOLUTE = 0x7FFFFFFF
_SERIES = (
    1.5403530393381608e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2, 2.402265069591007e-1, 6.931471805599453e-1, 1.0,
)  # fmt: skip


def _floats(value: float) -> ir.Value:
    return ir.Constant(F32S, [float(np.float32(value))] * 16)


def _split_group(b: ir.IRBuilder, values: ir.Value, limit: ir.Value, high: ir.Value, low: ir.Value, total: ir.Value, unit: ir.Value) -> ir.Value:
    parts = [load(b, values, 64 * part, F32S) for part in range(2)]
    bits = [b.and_(b.bitcast(part, I32S), all_lanes(_ABSOLUTE)) for part in parts]  # ordered as the absolute values, NaN above all
    most = call(b, "llvm.smax.v16i32", I32S, *bits)
    largest = b.bitcast(call(b, "llvm.vector.reduce.smax.v16i32", I32, most), F32)
    steps = ir.Constant(F32, float(LARGEST))
    factor = splat(b, b.fdiv(steps, largest))
    is_fine = b.fcmp_ordered(">", b.fmul(largest, largest), limit)
    keep = splat(b, b.sext(is_fine, I32))
    sums = []
    for index, part in enumerate(parts):
        scaled = call(b, "llvm.rint.v16f32", F32S, b.fmul(part, factor))
        is_number = b.fcmp_ordered("<=", call(b, "llvm.fabs.v16f32", F32S, scaled), _floats(LARGEST))
        number = b.fptosi(b.select(is_number, scaled, _floats(0.0)), I32S)
        first = b.ashr(b.add(number, all_lanes(64)), all_lanes(7))
        coarse = b.shl(first, all_lanes(7))
        second = b.and_(b.sub(number, coarse), keep)
        sums.append(b.add(coarse, second))
        for digits, address in ((first, high), (second, low)):
            store(b, b.trunc(digits, vector(ir.IntType(8))), b.add(address, ir.Constant(I64, 16 * index)), align=1)
    own_unit = b.fdiv(largest, steps)
    sum_ = call(b, "llvm.vector.reduce.add.v16i32", I32, b.add(*sums))
    store(b, b.fmul(b.sitofp(sum_, F32), own_unit), total)
    store(b, b.fmul(own_unit, ir.Constant(F32, 128.0)), unit)
    return b.zext(is_fine, I64)


def _gate(b: ir.IRBuilder, gate: ir.Value, up: ir.Value, out: ir.Value) -> ir.Value:
    value = load(b, gate, 0, F32S)
    power = _exp(b, b.fneg(call(b, "llvm.fabs.v16f32", F32S, value)))
    is_positive = b.fcmp_ordered(">=", value, _floats(0.0))
    numerator = b.fmul(value, b.select(is_positive, _floats(1.0), power))
    silu = b.fdiv(numerator, b.fadd(power, _floats(1.0)))
    store(b, b.fmul(silu, load(b, up, 0, F32S)), out)
    return ir.Constant(I64, 0)


def _exp(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """e^value for values up to 0, with a relative error of at most 2e-7 + 1e-7 * |value|; less than 2e-38 below -87."""
    power = b.fmul(value, _floats(1.4426950408889634))
    power = b.select(b.fcmp_ordered("<", power, _floats(-126.0)), _floats(-126.0), power)  # in this order NaN stays NaN
    whole = call(b, "llvm.rint.v16f32", F32S, power)
    rest = b.fsub(power, whole)
    series = _floats(_SERIES[0])
    for number in _SERIES[1:]:
        series = fma(b, series, rest, _floats(number))
    exponent = b.fptosi(b.select(b.fcmp_unordered("uno", whole, whole), _floats(0.0), whole), I32S)
    return b.fmul(series, b.bitcast(b.shl(b.add(exponent, all_lanes(127)), all_lanes(23)), F32S))


def _exp_below(b: ir.IRBuilder, values: ir.Value, largest: ir.Value) -> ir.Value:
    store(b, _exp(b, b.fsub(load(b, values, 0, F32S), splat(b, largest))), values)
    return ir.Constant(I64, 0)


_I64 = types.int64
split_group = operation(_I64, (_I64, types.float32, _I64, _I64, _I64, _I64), _split_group)
"""Addresses of 32 float32; the square above which a number asks for two digits; addresses of 32 high digits, of 32 low ones, of the sum of what
is written, and of the unit of high digits (both float32). Returns whether there are low digits; else those are 0."""
exp_below = operation(_I64, (_I64, types.float32), _exp_below)
"""Address of 16 float32, of which e^(value - largest) takes the place; of those above largest something does."""
gate_16 = operation(_I64, (_I64, _I64, _I64), _gate)
"""Addresses of 16 gates, of 16 values, and of silu(gate) * value."""
