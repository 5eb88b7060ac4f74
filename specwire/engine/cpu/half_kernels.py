"""Rows in float16, and products of any number of them with a block of features."""

import numpy as np
from numba import njit

from specwire.engine.cpu.half_tiles import (
    GROUP,
    MAX_ROWS,
    half_1,
    half_2,
    half_3,
    half_4,
    half_5,
    half_6,
    half_7,
    half_8,
    half_9,
    half_10,
    half_11,
    half_12,
    halve_16,
)
from specwire.engine.cpu.intrinsics import bits_of_f32, f32_of_bits
from specwire.engine.cpu.kernels import ABSOLUTE, OPTIONS, f32

_LARGEST_EXPONENT = 8
"""Of a row's numbers: 32 products with weights below 2 then stay below 2^15, and float16 ends at 2^16."""
_BIAS = 127
_LEAST = _LARGEST_EXPONENT + 2


@njit(**OPTIONS)
def halve(values, width, num_rows, halves, units, row):
    """Writes values [width] as unit * float16, each of those twice: from memory, processors broadcast 32 bits for nothing, 16 bits not.

    Args:
        num_rows: of halves.
        halves: address of float16 [width / 32, num_rows, 32, 2].
        units: address of float32 [num_rows], powers of two.
        row: which one.
    """
    x = f32(values, width)
    bits = np.int32(0)
    for i in range(width):
        bits = max(bits, bits_of_f32(x[i]) & ABSOLUTE)
    exponent = max(bits >> np.int32(23), np.int32(_LEAST))
    factor = f32_of_bits(np.int32((2 * _BIAS + _LARGEST_EXPONENT - exponent) << 23))
    f32(units + 4 * row, 1)[0] = f32_of_bits(np.int32((exponent - _LARGEST_EXPONENT) << 23))
    for group in range(width // GROUP):
        source, target = values + 4 * GROUP * group, halves + 4 * GROUP * (num_rows * group + row)
        halve_16(source, factor, target)
        halve_16(source + 64, factor, target + 64)


@njit(**OPTIONS)
def num_tiles(num_rows):
    """Into which so many rows are divided evenly."""
    return (num_rows + MAX_ROWS - 1) // MAX_ROWS


@njit(**OPTIONS)
def tile_start(tile, num_rows):
    """The first row of a tile."""
    return tile * num_rows // num_tiles(num_rows)


@njit(**OPTIONS)
def product_half(first, second, width, num_rows, halves, units, row, count, out):
    """Rows row .. row + count - 1, at most 12, of the product with two blocks of 32 features, into out, float32 [count, 64].

    Args:
        first, second: addresses of the blocks.
        num_rows, halves, units: as in `halve`.
    """
    groups, stride = width // GROUP, 4 * GROUP * num_rows
    halves += 4 * GROUP * row
    units += 4 * row
    if count == 1:
        half_1(first, second, groups, halves, stride, units, out)
    elif count == 2:
        half_2(first, second, groups, halves, stride, units, out)
    elif count == 3:
        half_3(first, second, groups, halves, stride, units, out)
    elif count == 4:
        half_4(first, second, groups, halves, stride, units, out)
    elif count == 5:
        half_5(first, second, groups, halves, stride, units, out)
    elif count == 6:
        half_6(first, second, groups, halves, stride, units, out)
    elif count == 7:
        half_7(first, second, groups, halves, stride, units, out)
    elif count == 8:
        half_8(first, second, groups, halves, stride, units, out)
    elif count == 9:
        half_9(first, second, groups, halves, stride, units, out)
    elif count == 10:
        half_10(first, second, groups, halves, stride, units, out)
    elif count == 11:
        half_11(first, second, groups, halves, stride, units, out)
    else:
        half_12(first, second, groups, halves, stride, units, out)
