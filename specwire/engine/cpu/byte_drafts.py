"""Drafting with weights of 8 bits."""

from numba import njit

from specwire.engine.cpu.byte_work import added_product, gated_product, plain_product, split_rows
from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.draft_work import make_draft_loop
from specwire.engine.cpu.kernels import OPTIONS
from specwire.engine.cpu.q4_work import PRODUCTS as Q4_PRODUCTS
from specwire.engine.cpu.work import SIGNATURE, Products

_IS_KEPT = keep_compiled()
_loop = make_draft_loop(Products("bytes", split_rows, plain_product, added_product, gated_product, Q4_PRODUCTS.head))


@njit(SIGNATURE, cache=_IS_KEPT, **OPTIONS)
def enter_drafts(job, semaphore, thread):
    """See `make_draft_loop`."""
    _loop(job, semaphore, thread)
