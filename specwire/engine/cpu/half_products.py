"""Single products in float16 tiles, on the caller's thread."""

from numba import njit

from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.half_kernels import halve, num_tiles, product_half, tile_start
from specwire.engine.cpu.half_tiles import FEATURES, TILE_BYTES, block_bytes
from specwire.engine.cpu.kernels import OPTIONS, f32

_IS_KEPT = keep_compiled()
_FLOATS = TILE_BYTES // 4
_block_bytes = njit(**OPTIONS)(block_bytes)


@njit(cache=_IS_KEPT, **OPTIONS)
def multiply_half(weight, out_features, width, values, num_rows, halves, units, scratch, out):
    """One product of rows [num_rows, width] (address of float32) into out [num_rows, out_features].

    Args:
        halves, units: as in `halve`.
        scratch: address of float32 [12, 64].
    """
    blocks = (out_features + FEATURES - 1) // FEATURES
    for row in range(num_rows):
        halve(values + 4 * width * row, width, num_rows, halves, units, row)
    for block in range(0, blocks, 2):
        count = min(_FLOATS, out_features - FEATURES * block)
        first = weight + block * _block_bytes(width)
        second = first + _block_bytes(width) if block + 1 < blocks else first
        for tile in range(num_tiles(num_rows)):
            row, last = tile_start(tile, num_rows), tile_start(tile + 1, num_rows)
            product_half(first, second, width, num_rows, halves, units, row, last - row, scratch)
            for index in range(last - row):
                x, y = f32(scratch + TILE_BYTES * index, count), f32(out + 4 * (out_features * (row + index) + FEATURES * block), count)
                for i in range(count):
                    y[i] = x[i]
