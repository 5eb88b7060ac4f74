"""What a forward pass computes between taking a piece of work and handing it back; compiled by Numba, without the interpreter's lock.

Nothing here depends on the number of threads, nor, for a token's numbers, on what other tokens are computed.
"""

import numpy as np
from numba import carray, njit

from specwire.engine.cpu.elements import LARGEST, split_group
from specwire.engine.cpu.intrinsics import bits_of_f32, f32_at, f32_of_bits, i8_at, i32_at, i64_at, round_even, u16_at
from specwire.engine.cpu.tiles import (
    GROUP,
    MAX_ROWS,
    NUMBERS_BYTES,
    ROWS_BYTES,
    q4_1,
    q4_2,
    q4_3,
    q4_4,
    q4_5,
    q4_6,
    q8_1,
    q8_2,
    q8_3,
    q8_4,
    q8_5,
    q8_6,
)

OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}, "boundscheck": False}

_LARGEST = np.float32(LARGEST)
_COARSE_SQUARE = np.float32(4.0**2)
"""A group has low digits if its largest number is more than 4 times the root of the row's mean square."""
_TINY = np.float32(np.finfo(np.float32).tiny)
ABSOLUTE = np.int32(0x7FFFFFFF)


@njit(**OPTIONS)
def f32(address, count):
    return carray(f32_at(address), (count,))


@njit(**OPTIONS)
def copy(source, target, count):
    x, y = f32(source, count), f32(target, count)
    for i in range(count):
        y[i] = x[i]


@njit(**OPTIONS)
def add(source, target, count):
    """Adds source [count] to target [count]."""
    x, y = f32(source, count), f32(target, count)
    for i in range(count):
        y[i] += x[i]


@njit(**OPTIONS)
def split_groups(values, width, digits, numbers, fine, row):
    """Writes each group of values [width] as unit * (high + low / 128).

    Low digits are 0 but where a group has a number that is large beside the row: there one digit would be too coarse for the others' sake.

    Args:
        digits: address of int8 [rows / 6, 2, width / 32, 6, 32], high ones and low ones.
        numbers: address of float32 [rows / 6, width / 32, 2, 6], sums of what is written, and units.
        fine: address of int64 [rows, words], a bit for each group that has low digits.
        row: which one of digits, numbers and fine.
    """
    x, groups = f32(values, width), width // GROUP
    digits += digits_at(row, width)
    numbers += NUMBERS_BYTES * groups * (row // MAX_ROWS) + 4 * (row % MAX_ROWS)
    is_fine = carray(i64_at(fine + 8 * num_words(width) * row), (num_words(width),))
    for word in range(num_words(width)):
        is_fine[word] = 0
    square = np.float32(0.0)
    for i in range(width):
        square += x[i] * x[i]
    limit = _COARSE_SQUARE * square / np.float32(width)
    for group in range(groups):
        high, own = digits + ROWS_BYTES * group, numbers + NUMBERS_BYTES * group
        low, unit = high + MAX_ROWS * width, own + NUMBERS_BYTES // 2
        if split_group(values + 4 * GROUP * group, limit, high, low, own, unit):
            is_fine[group >> 6] |= 1 << (group & 63)


@njit(**OPTIONS)
def digits_at(row, width):
    """Bytes before a row's first high digits."""
    return 2 * MAX_ROWS * width * (row // MAX_ROWS) + GROUP * (row % MAX_ROWS)


@njit(**OPTIONS)
def num_words(width):
    """Of bits of groups."""
    return (width // GROUP + 63) // 64


@njit(**OPTIONS)
def unite(fine, count, width, target):
    """Bits of groups in which one of count rows has two digits."""
    words = num_words(width)
    united = carray(i64_at(target), (words,))
    for word in range(words):
        united[word] = 0
        for row in range(count):
            united[word] |= carray(i64_at(fine + 8 * words * row), (words,))[word]


@njit(**OPTIONS)
def split_row(values, width, digits, unit, corrections, row):
    """Writes values [width] as unit * (128 * high + low), all with two digits.

    Args:
        digits: as in `split_groups`.
        unit: address of a float32.
        corrections: address of int32 [2], 128 times the sums of either kind of digits.
        row: which one of digits.
    """
    x = f32(values, width)
    bits = bits_of_f32(_TINY)
    for i in range(width):
        bits = max(bits, bits_of_f32(x[i]) & ABSOLUTE)
    largest = f32_of_bits(bits)
    f32(unit, 1)[0] = largest / _LARGEST
    factor = _LARGEST / largest
    of_high, of_low = np.int32(0), np.int32(0)
    for group in range(width // GROUP):
        y, at = f32(values + 4 * GROUP * group, GROUP), digits + digits_at(row, width) + ROWS_BYTES * group
        high, low = carray(i8_at(at), (GROUP,)), carray(i8_at(at + MAX_ROWS * width), (GROUP,))
        for i in range(GROUP):
            scaled = round_even(y[i] * factor)
            value = np.int32(scaled if abs(scaled) <= _LARGEST else np.float32(0.0))
            first = (value + np.int32(64)) >> np.int32(7)
            second = value - (first << np.int32(7))
            high[i], low[i] = np.int8(first), np.int8(second)
            of_high += first
            of_low += second
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
def product_q4(weight, width, digits, numbers, fine, num_rows, out, out_stride):
    """num_rows, at most 6, rows of 16 results, out_stride bytes apart.

    Args:
        digits, numbers: of the first row, a multiple of 6.
        fine: address of int64, the bits of groups in which any of the rows has two digits.
    """
    groups, low = width // GROUP, digits + MAX_ROWS * width
    if num_rows == 1:
        q4_1(weight, groups, digits, low, numbers, fine, out, out_stride)
    elif num_rows == 2:
        q4_2(weight, groups, digits, low, numbers, fine, out, out_stride)
    elif num_rows == 3:
        q4_3(weight, groups, digits, low, numbers, fine, out, out_stride)
    elif num_rows == 4:
        q4_4(weight, groups, digits, low, numbers, fine, out, out_stride)
    elif num_rows == 5:
        q4_5(weight, groups, digits, low, numbers, fine, out, out_stride)
    else:
        q4_6(weight, groups, digits, low, numbers, fine, out, out_stride)


@njit(**OPTIONS)
def product_q8(weight, width, digits, corrections, exact, num_exact, units, num_rows, out, out_stride):
    """As `product_q4`, for a head's weight."""
    groups, low = width // GROUP, digits + MAX_ROWS * width
    if num_rows == 1:
        q8_1(weight, groups, digits, low, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 2:
        q8_2(weight, groups, digits, low, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 3:
        q8_3(weight, groups, digits, low, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 4:
        q8_4(weight, groups, digits, low, corrections, exact, units, out, out_stride, num_exact)
    elif num_rows == 5:
        q8_5(weight, groups, digits, low, corrections, exact, units, out, out_stride, num_exact)
    else:
        q8_6(weight, groups, digits, low, corrections, exact, units, out, out_stride, num_exact)
