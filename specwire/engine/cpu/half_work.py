"""Forward passes in float16 tiles: their products, and the loop of a thread."""

from numba import njit

from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.elements import gate_16
from specwire.engine.cpu.half_kernels import halve, num_tiles, product_half, tile_start
from specwire.engine.cpu.half_tiles import FEATURES, TILE_BYTES, block_bytes
from specwire.engine.cpu.job import Word
from specwire.engine.cpu.kernels import OPTIONS, add, copy
from specwire.engine.cpu.pieces import share
from specwire.engine.cpu.work import SIGNATURE, Products, make_layer_piece, make_loop

_IS_KEPT = keep_compiled(__name__, "passes with weights in float16 tiles")
_TILE = 2 * FEATURES
_block_bytes = njit(**OPTIONS)(block_bytes)


@njit(**OPTIONS)
def _halve(j, source, width, first, last):
    for row in range(first, last):
        halve(source + 4 * width * row, width, j[Word.NUM_ROWS], j[Word.HALVES], j[Word.UNITS], row)


@njit(**OPTIONS)
def _product(j, first, second, width, tile, out):
    """A tile's rows of the product with two blocks. Returns the first of the rows, and the one after the last."""
    rows = j[Word.NUM_ROWS]
    row, after = tile_start(tile, rows), tile_start(tile + 1, rows)
    product_half(first, second, width, rows, j[Word.HALVES], j[Word.UNITS], row, after - row, out)
    return row, after


@njit(**OPTIONS)
def _product_of_all(j, piece, pieces, out_width, width, weight, bias, target, is_added, scratch):
    blocks = (out_width + FEATURES - 1) // FEATURES
    first_pair, last_pair = share(piece, pieces, (blocks + 1) // 2)
    for pair in range(first_pair, last_pair):
        feature = _TILE * pair
        count = min(_TILE, out_width - feature)
        first = weight + 2 * pair * _block_bytes(width)
        second = first + _block_bytes(width) if 2 * pair + 1 < blocks else first
        for tile in range(num_tiles(j[Word.NUM_ROWS])):
            row, after = _product(j, first, second, width, tile, scratch)
            for index in range(after - row):
                result = scratch + TILE_BYTES * index
                if bias:
                    add(bias + 4 * feature, result, count)
                out = target + 4 * (out_width * (row + index) + feature)
                if is_added:
                    add(result, out, count)
                else:
                    copy(result, out, count)


@njit(**OPTIONS)
def _plain_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    _product_of_all(j, piece, pieces, out_width, width, weight, bias, target, False, scratch)


@njit(**OPTIONS)
def _added_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    _product_of_all(j, piece, pieces, out_width, width, weight, bias, target, True, scratch)


@njit(**OPTIONS)
def _gated_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """A tile is a block of gate and the block of up that belongs to it."""
    blocks = out_width // FEATURES
    first_block, last_block = share(piece, pieces, blocks)
    for block in range(first_block, last_block):
        gate = weight + block * _block_bytes(width)
        for tile in range(num_tiles(j[Word.NUM_ROWS])):
            row, after = _product(j, gate, gate + blocks * _block_bytes(width), width, tile, scratch)
            for index in range(after - row):
                gates = scratch + TILE_BYTES * index
                ups = gates + 4 * FEATURES
                if bias:
                    add(bias + 4 * FEATURES * block, gates, FEATURES)
                    add(bias + 4 * FEATURES * (blocks + block), ups, FEATURES)
                out = target + 4 * (out_width * (row + index) + FEATURES * block)
                gate_16(gates, ups, out)
                gate_16(gates + 64, ups + 64, out + 64)


@njit(**OPTIONS)
def _head_piece(j, phase, piece, pieces, scratch):
    if phase == 0:
        first, last = share(piece, pieces, j[Word.NUM_ROWS])
        _halve(j, j[Word.NORMED], j[Word.HIDDEN], first, last)
    else:
        _plain_product(j, piece, pieces, j[Word.HEAD_FEATURES], j[Word.HIDDEN], j[Word.HEAD], 0, j[Word.OUT], scratch)


PRODUCTS = Products("half", _halve, _plain_product, _added_product, _gated_product, _head_piece)
_loop = make_loop(PRODUCTS.name, make_layer_piece(PRODUCTS), PRODUCTS.head)


@njit(SIGNATURE, cache=_IS_KEPT, **OPTIONS)
def enter_half(job, semaphore, thread):
    """See `make_loop`."""
    _loop(job, semaphore, thread)
