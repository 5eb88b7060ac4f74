"""Products of passes in 8 bits: rows in two digits, weights without exact columns."""

from numba import njit

from specwire.engine.cpu.elements import gate_16
from specwire.engine.cpu.job import Word
from specwire.engine.cpu.kernels import OPTIONS, digits_at, f32, product_q8, split_row
from specwire.engine.cpu.pieces import share
from specwire.engine.cpu.tiles import MAX_ROWS
from specwire.engine.cpu.weights import FEATURES


@njit(**OPTIONS)
def split_rows(j, source, width, first, last):
    """See `Products.prepare`."""
    for row in range(first, last):
        split_row(source + 4 * width * row, width, j[Word.DIGITS], j[Word.UNITS] + 4 * row, j[Word.CORRECTIONS] + 8 * row, row)


@njit(**OPTIONS)
def _product(j, block, row, count, width, weight, out, out_stride):
    """Rows row .. row + count - 1 of the product with a block of 16 features."""
    product_q8(
        weight + block * (FEATURES * width + 64), width, j[Word.DIGITS] + digits_at(row, width), j[Word.CORRECTIONS] + 8 * row, 0, 0,
        j[Word.UNITS] + 4 * row, count, out, out_stride,
    )  # fmt: skip


@njit(**OPTIONS)
def _add(source, target):
    x, y = f32(source, FEATURES), f32(target, FEATURES)
    for lane in range(FEATURES):
        y[lane] += x[lane]


@njit(**OPTIONS)
def plain_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """See `Products`."""
    num_blocks = out_width // FEATURES
    first, last = share(piece, pieces, num_blocks)
    rows, stride = j[Word.NUM_ROWS], 64 * num_blocks
    for block in range(first, last):
        for row in range(0, rows, MAX_ROWS):
            count, out = min(MAX_ROWS, rows - row), target + stride * row + 64 * block
            _product(j, block, row, count, width, weight, out, stride)
            if bias:
                for index in range(count):
                    _add(bias + 64 * block, out + stride * index)


@njit(**OPTIONS)
def added_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """See `Products`."""
    num_blocks = out_width // FEATURES
    first, last = share(piece, pieces, num_blocks)
    rows, stride = j[Word.NUM_ROWS], 64 * num_blocks
    for block in range(first, last):
        for row in range(0, rows, MAX_ROWS):
            count, out = min(MAX_ROWS, rows - row), target + stride * row + 64 * block
            _product(j, block, row, count, width, weight, scratch, 64)
            for index in range(count):
                _add(scratch + 64 * index, out + stride * index)
                if bias:
                    _add(bias + 64 * block, out + stride * index)


@njit(**OPTIONS)
def gated_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """See `Products`."""
    num_blocks = out_width // FEATURES
    first, last = share(piece, pieces, num_blocks)
    rows, ups = j[Word.NUM_ROWS], scratch + 64 * MAX_ROWS
    for block in range(first, last):
        for row in range(0, rows, MAX_ROWS):
            count = min(MAX_ROWS, rows - row)
            _product(j, block, row, count, width, weight, scratch, 64)
            _product(j, block + num_blocks, row, count, width, weight, ups, 64)
            for index in range(count):
                if bias:
                    _add(bias + 64 * block, scratch + 64 * index)
                    _add(bias + 64 * (block + num_blocks), ups + 64 * index)
                gate_16(scratch + 64 * index, ups + 64 * index, target + 64 * ((row + index) * num_blocks + block))
