"""Pieces of a forward pass that are no products, whatever the weights are kept in."""

from numba import carray, njit

from specwire.engine.cpu.attention import attend
from specwire.engine.cpu.intrinsics import i64_at
from specwire.engine.cpu.job import SCRATCH_HEADER, LayerWord, Word
from specwire.engine.cpu.kernels import OPTIONS, copy, f32, normalise, rotate, store_bf16


@njit(**OPTIONS)
def normalise_rows(j, factor, target, first, last):
    width = j[Word.HIDDEN]
    for row in range(first, last):
        normalise(j[Word.RESIDUAL] + 4 * width * row, factor, target + 4 * width * row, width, f32(j[Word.FLOATS], 2)[0])


@njit(**OPTIONS)
def tap(j, target, first, last):
    """Copies rows of the residual stream, if anybody wants them."""
    if target:
        width = j[Word.HIDDEN]
        copy(j[Word.RESIDUAL] + 4 * width * first, target + 4 * width * first, width * (last - first))


@njit(**OPTIONS)
def rotate_rows(j, w, first, last):
    """Rotates queries and keys, and stores keys and values."""
    heads, kv_heads, dim, eps = j[Word.HEADS], j[Word.KV_HEADS], j[Word.DIM], f32(j[Word.FLOATS], 2)[0]
    positions, slots = carray(i64_at(j[Word.POSITIONS]), (last,)), carray(i64_at(j[Word.SLOTS]), (last,))
    for row in range(first, last):
        base = j[Word.QKV] + 4 * (heads + 2 * kv_heads) * dim * row
        at = 4 * dim * positions[row]
        for head in range(heads + kv_heads):
            norm = w[LayerWord.Q_NORM] if head < heads else w[LayerWord.K_NORM]
            here = base + 4 * dim * head
            if norm:
                normalise(here, norm, here, dim, eps)
            rotate(here, j[Word.COS] + at, j[Word.SIN] + at, dim)
        store_bf16(base + 4 * heads * dim, w[LayerWord.KV] + 4 * kv_heads * dim * slots[row], 2 * kv_heads * dim)


@njit(**OPTIONS)
def attend_rows(j, w, piece, scratch):
    heads, kv_heads, dim = j[Word.HEADS], j[Word.KV_HEADS], j[Word.DIM]
    number, head = piece // kv_heads, piece % kv_heads
    rows = carray(i64_at(j[Word.ROW_GROUPS] + 24 * number), (3,))
    row, group, width = rows[0], heads // kv_heads, (heads + 2 * kv_heads) * dim
    position = carray(i64_at(j[Word.POSITIONS]), (row + 1,))[row]
    attend(
        j[Word.QKV] + 4 * (width * row + dim * group * head), 4 * width, w[LayerWord.KV], rows[2], j[Word.BLOCK_SIZE], position, rows[1], head,
        kv_heads, group, dim, f32(j[Word.FLOATS], 2)[1], scratch + 4 * SCRATCH_HEADER,
        j[Word.ATTENDED] + 4 * dim * (heads * row + group * head), 4 * heads * dim,
    )  # fmt: skip


@njit(**OPTIONS)
def share(piece, pieces, count):
    """The first of a piece's part of count things, and the first of the next one's."""
    return piece * count // pieces, (piece + 1) * count // pieces
