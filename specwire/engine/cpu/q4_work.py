"""Forward passes in 4 bits, with a head in 8: rows in one digit or two, and the loop of a thread."""

from numba import njit

from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.job import Word
from specwire.engine.cpu.kernels import OPTIONS, digits_at, num_words, product_q4, split_groups, unite
from specwire.engine.cpu.tile_work import head_piece, make_products
from specwire.engine.cpu.tiles import GROUP, GROUP_BYTES, MAX_ROWS, NUMBERS_BYTES
from specwire.engine.cpu.work import SIGNATURE, make_layer_piece, make_loop

_IS_KEPT = keep_compiled(__name__, "passes with weights in 4 bits")


@njit(**OPTIONS)
def _digits(j, source, width, first, last):
    """See `Products.prepare`."""
    for row in range(first, last):
        split_groups(source + 4 * width * row, width, j[Word.DIGITS], j[Word.NUMBERS], j[Word.FINE], row)


@njit(**OPTIONS)
def _unite_rows(j, row, count, width, scratch):
    """Into scratch, bits of groups in which any of the rows has two digits."""
    unite(j[Word.FINE] + 8 * num_words(width) * row, count, width, scratch)


@njit(**OPTIONS)
def _product(j, block, row, count, width, weight, fine, out, out_stride):
    groups = width // GROUP
    product_q4(
        weight + block * groups * GROUP_BYTES, width, j[Word.DIGITS] + digits_at(row, width),
        j[Word.NUMBERS] + NUMBERS_BYTES * groups * (row // MAX_ROWS), fine, count, out, out_stride,
    )  # fmt: skip


_PRODUCTS = make_products("q4", _digits, _unite_rows, _product, head_piece)
_loop = make_loop(_PRODUCTS.name, make_layer_piece(_PRODUCTS), _PRODUCTS.head)


@njit(SIGNATURE, cache=_IS_KEPT, **OPTIONS)
def enter_q4(job, semaphore, thread):
    """See `make_loop`."""
    _loop(job, semaphore, thread)
