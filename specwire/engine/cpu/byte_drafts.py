"""Drafting with weights of 8 bits, without exact columns: rows in two digits, and the loop of a thread."""

from numba import njit

from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.draft_work import make_draft_loop
from specwire.engine.cpu.job import Word
from specwire.engine.cpu.kernels import OPTIONS, digits_at, product_q8, split_row
from specwire.engine.cpu.tile_work import head_piece, make_products
from specwire.engine.cpu.weights import FEATURES
from specwire.engine.cpu.work import SIGNATURE

_IS_KEPT = keep_compiled(__name__, "drafts of a head in 8 bits")


@njit(**OPTIONS)
def _split_rows(j, source, width, first, last):
    """See `Products.prepare`."""
    for row in range(first, last):
        split_row(source + 4 * width * row, width, j[Word.DIGITS], j[Word.UNITS] + 4 * row, j[Word.CORRECTIONS] + 8 * row, row)


@njit(**OPTIONS)
def _take_rows(j, row, count, width, scratch):
    """Rows in two digits have nothing in common."""


@njit(**OPTIONS)
def _product(j, block, row, count, width, weight, scratch, out, out_stride):
    product_q8(
        weight + block * (FEATURES * width + 64), width, j[Word.DIGITS] + digits_at(row, width), j[Word.CORRECTIONS] + 8 * row, 0, 0,
        j[Word.UNITS] + 4 * row, count, out, out_stride,
    )  # fmt: skip


_loop = make_draft_loop(make_products("bytes", _split_rows, _take_rows, _product, head_piece))


@njit(SIGNATURE, cache=_IS_KEPT, **OPTIONS)
def enter_drafts(job, semaphore, thread):
    """See `make_draft_loop`."""
    _loop(job, semaphore, thread)
