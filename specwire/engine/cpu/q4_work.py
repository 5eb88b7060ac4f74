"""Forward passes in 4 bits: products of rows in digits, and the loop of a thread."""

from numba import njit

from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.elements import gate_16
from specwire.engine.cpu.job import FINE_WORDS, Word
from specwire.engine.cpu.kernels import OPTIONS, digits_at, f32, num_words, product_q4, product_q8, split_groups, split_row, unite
from specwire.engine.cpu.pieces import share
from specwire.engine.cpu.tiles import GROUP, GROUP_BYTES, MAX_ROWS, NUMBERS_BYTES
from specwire.engine.cpu.weights import FEATURES
from specwire.engine.cpu.work import SIGNATURE, Products, make_layer_piece, make_loop

_IS_KEPT = keep_compiled()


@njit(**OPTIONS)
def _product(j, block, row, count, width, weight, fine, out, out_stride):
    """Rows row .. row + count - 1 of the product with a block of 16 features."""
    groups = width // GROUP
    product_q4(
        weight + block * groups * GROUP_BYTES, width, j[Word.DIGITS] + digits_at(row, width),
        j[Word.NUMBERS] + NUMBERS_BYTES * groups * (row // MAX_ROWS), fine, count, out, out_stride,
    )  # fmt: skip


@njit(**OPTIONS)
def _plain_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """A piece's blocks of features into target [T, out_width]."""
    num_blocks = out_width // FEATURES
    first, last = share(piece, pieces, num_blocks)
    rows = j[Word.NUM_ROWS]
    for row in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - row)
        unite(j[Word.FINE] + 8 * num_words(width) * row, count, width, scratch)
        for block in range(first, last):
            out = target + 64 * (row * num_blocks + block)
            _product(j, block, row, count, width, weight, scratch, out, 64 * num_blocks)
            if bias:
                b = f32(bias + 64 * block, 16)
                for index in range(count):
                    y = f32(out + 64 * num_blocks * index, 16)
                    for lane in range(16):
                        y[lane] += b[lane]


@njit(**OPTIONS)
def _added_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """As `_plain_product`, added to what target has."""
    num_blocks = out_width // FEATURES
    first, last = share(piece, pieces, num_blocks)
    rows, products = j[Word.NUM_ROWS], scratch + 8 * FINE_WORDS
    for row in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - row)
        unite(j[Word.FINE] + 8 * num_words(width) * row, count, width, scratch)
        for block in range(first, last):
            _product(j, block, row, count, width, weight, scratch, products, 64)
            for index in range(count):
                x, y = f32(products + 64 * index, 16), f32(target + 64 * ((row + index) * num_blocks + block), 16)
                for lane in range(16):
                    y[lane] += x[lane]
                if bias:
                    b = f32(bias + 64 * block, 16)
                    for lane in range(16):
                        y[lane] += b[lane]


@njit(**OPTIONS)
def _gated_product(j, piece, pieces, out_width, width, weight, bias, target, scratch):
    """A piece's blocks of gate, with those of up that belong to them, into target [T, out_width]: silu(gate) * up."""
    num_blocks = out_width // FEATURES
    first, last = share(piece, pieces, num_blocks)
    rows, gates = j[Word.NUM_ROWS], scratch + 8 * FINE_WORDS
    ups = gates + 64 * MAX_ROWS
    for row in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - row)
        unite(j[Word.FINE] + 8 * num_words(width) * row, count, width, scratch)
        for block in range(first, last):
            _product(j, block, row, count, width, weight, scratch, gates, 64)
            _product(j, block + num_blocks, row, count, width, weight, scratch, ups, 64)
            for index in range(count):
                if bias:
                    gate, of_gate = f32(gates + 64 * index, 16), f32(bias + 64 * block, 16)
                    up, of_up = f32(ups + 64 * index, 16), f32(bias + 64 * (block + num_blocks), 16)
                    for lane in range(16):
                        gate[lane] += of_gate[lane]
                        up[lane] += of_up[lane]
                gate_16(gates + 64 * index, ups + 64 * index, target + 64 * ((row + index) * num_blocks + block))


@njit(**OPTIONS)
def _digits(j, source, width, first, last):
    for row in range(first, last):
        split_groups(source + 4 * width * row, width, j[Word.DIGITS], j[Word.NUMBERS], j[Word.FINE], row)


@njit(**OPTIONS)
def _head_piece(j, phase, piece, pieces, scratch):
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


PRODUCTS = Products("q4", _digits, _plain_product, _added_product, _gated_product, _head_piece)
_loop = make_loop(PRODUCTS.name, make_layer_piece(PRODUCTS), PRODUCTS.head)


@njit(SIGNATURE, cache=_IS_KEPT, **OPTIONS)
def enter_q4(job, semaphore, thread):
    """See `make_loop`."""
    _loop(job, semaphore, thread)
