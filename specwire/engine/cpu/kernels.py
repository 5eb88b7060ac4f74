"""What a forward pass computes between taking a piece of work and handing it back; compiled by Numba, without the interpreter's lock.

Nothing here depends on the number of threads, nor, for a token's numbers, on what other tokens are computed.
"""

import numpy as np
from numba import carray, njit

from specwire.engine.cpu.intrinsics import bits_of_f32, f32_at, f32_of_bits, i8_at, i32_at, round_even, u16_at
from specwire.engine.cpu.tiles import GROUP, q4_1, q4_2, q4_3, q4_4, q4_5, q4_6, q8_1, q8_2, q8_3, q8_4, q8_5, q8_6

OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}, "boundscheck": False}

_LARGEST = np.float32(127 * 128 - 1)
_TINY = np.float32(np.finfo(np.float32).tiny)
ABSOLUTE = np.int32(0x7FFFFFFF)
_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-126.0)


@njit(**OPTIONS)
def f32(address, count):
    return carray(f32_at(address), (count,))


@njit(**OPTIONS)
def split_digits(values, width, digits, sums, unit, corrections):
    """Writes values [width] as round(value / unit) = 128 * high + low: digits [2 * width] int8 holds all high ones, then all low ones.

    Args:
        sums: address of float32 [width / 32], the groups' sums of the rounded values.
        unit: address of a float32.
        corrections: address of int32 [2], 128 times the sums of either kind of digits; 0 = not wanted.
    """
    x = f32(values, width)
    high, low = carray(i8_at(digits), (width,)), carray(i8_at(digits + width), (width,))
    group_sums = f32(sums, width // GROUP)
    bits = bits_of_f32(_TINY)
    for i in range(width):  # absolute values are ordered as their bits are, NaN above all: then all results are NaN, too
        bits = max(bits, bits_of_f32(x[i]) & ABSOLUTE)
    largest = f32_of_bits(bits)
    f32(unit, 1)[0] = largest / _LARGEST
    factor = _LARGEST / largest
    for group in range(width // GROUP):
        total = np.int32(0)
        for i in range(group * GROUP, (group + 1) * GROUP):
            scaled = round_even(x[i] * factor)
            value = np.int32(scaled if abs(scaled) <= _LARGEST else np.float32(0.0))
            total += value
            digit = (value + np.int32(64)) >> np.int32(7)
            high[i] = np.int8(digit)
            low[i] = np.int8(value - (digit << np.int32(7)))
        group_sums[group] = np.float32(total)
    if corrections:
        of_high, of_low = np.int32(0), np.int32(0)
        for i in range(width):
            of_high += np.int32(high[i])
            of_low += np.int32(low[i])
        pair = carray(i32_at(corrections), (2,))
        pair[0], pair[1] = of_high << np.int32(7), of_low << np.int32(7)


@njit(**OPTIONS)
def normalise(source, factor, out, width, eps):
    """Root-mean-square norm of source [width] times factor [width]."""
    x, weight, y = f32(source, width), f32(factor, width), f32(out, width)
    total = np.float32(0.0)
    for i in range(width):
        total += x[i] * x[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
    for i in range(width):
        y[i] = x[i] * scale * weight[i]


@njit(**OPTIONS)
def to_bf16(value):
    """Bits of the nearest bfloat16; NaN stays NaN."""
    bits = bits_of_f32(value)
    rounded = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    return np.uint16(rounded if value == value else np.int32(0x7FC0))


@njit(**OPTIONS)
def rotate(head, cos, sin, dim):
    """Rotates one head [dim] in place; sin's first half is negated."""
    x, c, s = f32(head, dim), f32(cos, dim), f32(sin, dim)
    half = dim // 2
    for i in range(half):
        first, second = x[i], x[i + half]
        x[i] = first * c[i] + second * s[i]
        x[i + half] = second * c[i + half] + first * s[i + half]


@njit(**OPTIONS)
def store_bf16(source, target, count):
    x, y = f32(source, count), carray(u16_at(target), (count,))
    for i in range(count):
        y[i] = to_bf16(x[i])


@njit(**OPTIONS)
def exp(value):
    """e^value for values up to 0, within 2 units of the last place; 0 below -87."""
    power = value * _LOG2_E
    power = _LOWEST if power < _LOWEST else power  # in this order NaN stays NaN
    whole = round_even(power)
    rest = power - whole
    series = np.float32(1.5403530393381608e-4)
    series = series * rest + np.float32(1.3333558146428443e-3)
    series = series * rest + np.float32(9.618129107628477e-3)
    series = series * rest + np.float32(5.550410866482158e-2)
    series = series * rest + np.float32(2.402265069591007e-1)
    series = series * rest + np.float32(6.931471805599453e-1)
    series = series * rest + np.float32(1.0)
    return series * f32_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@njit(**OPTIONS)
def silu(value):
    """value / (1 + e^-value)."""
    power = exp(-abs(value))
    return value * (np.float32(1.0) if value >= np.float32(0.0) else power) / (np.float32(1.0) + power)


@njit(**OPTIONS)
def product_q4(weight, width, digits, sums, units, num_rows, out, out_stride):
    """num_rows, at most 6, rows of 16 results, out_stride bytes apart."""
    groups, step = width // GROUP, 4 * (width // GROUP)
    if num_rows == 1:
        q4_1(weight, groups, digits, width, sums, step, units, out, out_stride, 0)
    elif num_rows == 2:
        q4_2(weight, groups, digits, width, sums, step, units, out, out_stride, 0)
    elif num_rows == 3:
        q4_3(weight, groups, digits, width, sums, step, units, out, out_stride, 0)
    elif num_rows == 4:
        q4_4(weight, groups, digits, width, sums, step, units, out, out_stride, 0)
    elif num_rows == 5:
        q4_5(weight, groups, digits, width, sums, step, units, out, out_stride, 0)
    else:
        q4_6(weight, groups, digits, width, sums, step, units, out, out_stride, 0)


@njit(**OPTIONS)
def product_q8(weight, width, digits, corrections, exact, num_exact, units, num_rows, out, out_stride):
    """As `product_q4`, for a head's weight."""
    quads = width // 4
    if num_rows == 1:
        q8_1(weight, quads, digits, width, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 2:
        q8_2(weight, quads, digits, width, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 3:
        q8_3(weight, quads, digits, width, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 4:
        q8_4(weight, quads, digits, width, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 5:
        q8_5(weight, quads, digits, width, corrections, exact, units, out, out_stride, num_exact)
    else:
        q8_6(weight, quads, digits, width, corrections, exact, units, out, out_stride, num_exact)
