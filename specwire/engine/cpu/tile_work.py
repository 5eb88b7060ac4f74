"""Products of rows in digits with blocks of 16 features: loops that serve weights of any form, and heads in 8 bits."""

from typing import Any

from numba import njit

from specwire.engine.cpu.elements import gate_16
from specwire.engine.cpu.job import FINE_WORDS, Word
from specwire.engine.cpu.kernels import OPTIONS, add, digits_at, product_q8, split_row
from specwire.engine.cpu.pieces import share
from specwire.engine.cpu.tiles import MAX_ROWS
from specwire.engine.cpu.weights import FEATURES
from specwire.engine.cpu.work import Products, compiled_for

_BLOCK_BYTES = 4 * FEATURES
"""Of a row's results."""


@njit(**OPTIONS)
def head_piece(j, phase, piece, pieces, scratch):
    """Of a head in 8 bits; see `Products.head`."""
    rows, hidden, num_exact = j[Word.NUM_ROWS], j[Word.HIDDEN], j[Word.NUM_EXACT]
    if phase == 0:
        first, last = share(piece, pieces, rows)
        for row in range(first, last):
            values, corrections = j[Word.NORMED] + 4 * hidden * row, j[Word.CORRECTIONS] + 8 * row
            split_row(values, hidden, j[Word.DIGITS], j[Word.UNITS] + 4 * row, corrections, row)
        return
    blocks, block_bytes = j[Word.HEAD_BLOCKS], 16 * hidden + 64 + 64 * num_exact
    first, last = share(piece, pieces, blocks)
    for block in range(first, last):
        for row in range(0, rows, MAX_ROWS):
            product_q8(
                j[Word.HEAD] + block * block_bytes, hidden, j[Word.DIGITS] + digits_at(row, hidden), j[Word.CORRECTIONS] + 8 * row,
                j[Word.EXACT] + 4 * num_exact * row, num_exact, j[Word.UNITS] + 4 * row, min(MAX_ROWS, rows - row),
                j[Word.OUT] + 64 * (blocks * row + block), 64 * blocks,
            )  # fmt: skip


def make_products(name: str, prepare: Any, take_rows: Any, multiply: Any, head: Any) -> Products:
    """Products of one form of weights.

    Args:
        name, prepare, head: as in `Products`.
        take_rows: j, row, count, width, scratch: what products of rows row .. row + count - 1 have in common; its results, at most FINE_WORDS
            words, stay in scratch.
        multiply: j, block, row, count, width, weight, scratch, out, out_stride: those rows of the product with a block of features, written
            out_stride bytes apart.
    """
    plain = _make_product(name, take_rows, multiply, is_added=False)
    added = _make_product(name, take_rows, multiply, is_added=True)
    return Products(name, prepare, plain, added, _make_gated(name, take_rows, multiply), head)


def _make_product(name: str, take_rows: Any, multiply: Any, *, is_added: bool) -> Any:
    """A piece's blocks of features, into target [T, out_width] or added to what that has."""

    @compiled_for(f"added_{name}" if is_added else f"plain_{name}")
    def product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
        num_blocks = out_width // FEATURES
        first, last = share(piece, pieces, num_blocks)
        rows, stride, results = j[Word.NUM_ROWS], _BLOCK_BYTES * num_blocks, scratch + 8 * FINE_WORDS
        for row in range(0, rows, MAX_ROWS):
            count = min(MAX_ROWS, rows - row)
            take_rows(j, row, count, width, scratch)
            for block in range(first, last):
                out = target + stride * row + _BLOCK_BYTES * block
                if is_added:
                    multiply(j, block, row, count, width, weight, scratch, results, _BLOCK_BYTES)
                    for index in range(count):
                        add(results + _BLOCK_BYTES * index, out + stride * index, FEATURES)
                else:
                    multiply(j, block, row, count, width, weight, scratch, out, stride)
                if bias:
                    for index in range(count):
                        add(bias + _BLOCK_BYTES * block, out + stride * index, FEATURES)

    return product


def _make_gated(name: str, take_rows: Any, multiply: Any) -> Any:
    """A piece's blocks of gate, with those of up that belong to them, into target [T, out_width]: silu(gate) * up."""

    @compiled_for(name)
    def gated_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
        num_blocks = out_width // FEATURES
        first, last = share(piece, pieces, num_blocks)
        rows, gates = j[Word.NUM_ROWS], scratch + 8 * FINE_WORDS
        ups = gates + _BLOCK_BYTES * MAX_ROWS
        for row in range(0, rows, MAX_ROWS):
            count = min(MAX_ROWS, rows - row)
            take_rows(j, row, count, width, scratch)
            for block in range(first, last):
                multiply(j, block, row, count, width, weight, scratch, gates, _BLOCK_BYTES)
                multiply(j, block + num_blocks, row, count, width, weight, scratch, ups, _BLOCK_BYTES)
                for index in range(count):
                    gate, up = gates + _BLOCK_BYTES * index, ups + _BLOCK_BYTES * index
                    if bias:
                        add(bias + _BLOCK_BYTES * block, gate, FEATURES)
                        add(bias + _BLOCK_BYTES * (block + num_blocks), up, FEATURES)
                    gate_16(gate, up, target + _BLOCK_BYTES * ((row + index) * num_blocks + block))

    return gated_product
