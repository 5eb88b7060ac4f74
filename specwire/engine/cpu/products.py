"""Single products, on the caller's thread."""

from numba import njit

from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.kernels import OPTIONS, digits_at, num_words, product_q4, product_q8, split_groups, split_row, unite
from specwire.engine.cpu.tiles import GROUP, GROUP_BYTES, MAX_ROWS, NUMBERS_BYTES

_IS_KEPT = keep_compiled()


@njit(cache=_IS_KEPT, **OPTIONS)
def multiply_q4(weight, num_blocks, width, values, num_rows, digits, numbers, fine, out):
    """One product of rows [num_rows, width] (address of float32) into out [num_rows, 16 * num_blocks], on the caller's thread.

    Args:
        digits, numbers: as in `split_groups`, for a multiple of 6 rows.
        fine: for one row more.
    """
    groups = width // GROUP
    for row in range(num_rows):
        split_groups(values + 4 * width * row, width, digits, numbers, fine, row)
    united = fine + 8 * num_words(width) * num_rows
    for row in range(0, num_rows, MAX_ROWS):
        count = min(MAX_ROWS, num_rows - row)
        unite(fine + 8 * num_words(width) * row, count, width, united)
        for block in range(num_blocks):
            product_q4(
                weight + block * groups * GROUP_BYTES, width, digits + digits_at(row, width),
                numbers + NUMBERS_BYTES * groups * (row // MAX_ROWS), united, count, out + 64 * (num_blocks * row + block), 64 * num_blocks,
            )  # fmt: skip


@njit(cache=_IS_KEPT, **OPTIONS)
def multiply_q8(weight, num_blocks, width, values, num_rows, digits, units, corrections, exact, num_exact, out):
    """As `multiply_q4`, with a head's weight."""
    for row in range(num_rows):
        split_row(values + 4 * width * row, width, digits, units + 4 * row, corrections + 8 * row, row)
    for block in range(num_blocks):
        for row in range(0, num_rows, MAX_ROWS):
            product_q8(
                weight + block * (16 * width + 64 + 64 * num_exact), width, digits + digits_at(row, width), corrections + 8 * row,
                exact + 4 * num_exact * row, num_exact, units + 4 * row, min(MAX_ROWS, num_rows - row),
                out + 64 * (num_blocks * row + block), 64 * num_blocks,
            )  # fmt: skip
