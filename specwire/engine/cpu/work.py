"""Forward passes in pieces that threads take one after another, and the loops of those threads.

A piece starts when all pieces of earlier phases are done. A thread that comes late, or loses its core, delays only the piece that it has:
nobody waits for a thread, only for work.
"""

from numba import carray, njit

from specwire.engine.cpu.attention import attend
from specwire.engine.cpu.compiled import keep_compiled
from specwire.engine.cpu.elements import gate_16
from specwire.engine.cpu.intrinsics import add_atomic, give_way, i64_at, load_acquire, pause, post, replace_atomic, store_release, wait
from specwire.engine.cpu.job import FINE_WORDS, NUM_PHASES, SCRATCH_HEADER, LayerWord, Phase, Word
from specwire.engine.cpu.kernels import (
    OPTIONS,
    digits_at,
    f32,
    normalise,
    num_words,
    product_q4,
    product_q8,
    rotate,
    split_groups,
    split_row,
    store_bf16,
    unite,
)
from specwire.engine.cpu.tiles import GROUP, GROUP_BYTES, MAX_ROWS, NUMBERS_BYTES

_IS_KEPT = keep_compiled()
_MANY = (1 << 32) - 1
_SPINS = 60
"""Pauses, of some 50 ns, before a thread that waits offers its core to others."""
_IDLE_SPINS = 400
"""Pauses of a helper without work before it sleeps: the head follows the layers at once."""


@njit(**OPTIONS)
def _product(j, block, row, count, width, weight, fine, out, out_stride):
    """Rows row .. row + count - 1 of the product with a block of 16 features."""
    groups = width // GROUP
    product_q4(
        weight + block * groups * GROUP_BYTES, width, j[Word.DIGITS] + digits_at(row, width),
        j[Word.NUMBERS] + NUMBERS_BYTES * groups * (row // MAX_ROWS), fine, count, out, out_stride,
    )  # fmt: skip


@njit(**OPTIONS)
def _plain_product(j, first, last, num_blocks, width, weight, bias, target, scratch):
    """Blocks first .. last - 1 into target [T, 16 * num_blocks]."""
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
def _added_product(j, first, last, num_blocks, width, weight, bias, target, scratch):
    """As `_plain_product`, added to what target has."""
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
def _gated_product(j, first, last, num_blocks, width, weight, bias, target, scratch):
    """Blocks of gate, with those of up that belong to them, into target: silu(gate) * up."""
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
def _normalise(j, factor, target, first, last):
    width = j[Word.HIDDEN]
    for row in range(first, last):
        normalise(j[Word.RESIDUAL] + 4 * width * row, factor, target + 4 * width * row, width, f32(j[Word.FLOATS], 2)[0])


@njit(**OPTIONS)
def _tap(j, target, first, last):
    """Copies rows of the residual stream, if anybody wants them."""
    if target:
        width = j[Word.HIDDEN]
        x, y = f32(j[Word.RESIDUAL] + 4 * width * first, width * (last - first)), f32(target + 4 * width * first, width * (last - first))
        for i in range(width * (last - first)):
            y[i] = x[i]


@njit(**OPTIONS)
def _rotate(j, w, first, last):
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
def _attend(j, w, piece, scratch):
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
def _share(piece, pieces, count):
    """The first of a piece's part of count things, and the first of the next one's."""
    return piece * count // pieces, (piece + 1) * count // pieces


@njit(**OPTIONS)
def _layer_piece(j, w, phase, piece, pieces, scratch):
    hidden, inner, dim = j[Word.HIDDEN], j[Word.INNER], j[Word.DIM]
    qkv_width, attended_width = (j[Word.HEADS] + 2 * j[Word.KV_HEADS]) * dim, j[Word.HEADS] * dim
    first_row, last_row = _share(piece, pieces, j[Word.NUM_ROWS])
    if phase == Phase.INPUT_NORM:
        _tap(j, w[LayerWord.TAP], first_row, last_row)
        _normalise(j, w[LayerWord.INPUT_NORM], j[Word.NORMED], first_row, last_row)
        _digits(j, j[Word.NORMED], hidden, first_row, last_row)
    elif phase == Phase.QKV:
        blocks = qkv_width // 16
        first, last = _share(piece, pieces, blocks)
        _plain_product(j, first, last, blocks, hidden, w[LayerWord.QKV], w[LayerWord.QKV_BIAS], j[Word.QKV], scratch)
    elif phase == Phase.ROTATE:
        _rotate(j, w, first_row, last_row)
    elif phase == Phase.ATTEND:
        _attend(j, w, piece, scratch)
    elif phase == Phase.O_DIGITS:
        _digits(j, j[Word.ATTENDED], attended_width, first_row, last_row)
    elif phase == Phase.O:
        blocks = hidden // 16
        first, last = _share(piece, pieces, blocks)
        _added_product(j, first, last, blocks, attended_width, w[LayerWord.O], w[LayerWord.O_BIAS], j[Word.RESIDUAL], scratch)
    elif phase == Phase.POST_NORM:
        _normalise(j, w[LayerWord.POST_NORM], j[Word.NORMED], first_row, last_row)
        _digits(j, j[Word.NORMED], hidden, first_row, last_row)
    elif phase == Phase.GATE_UP:
        blocks = inner // 16
        first, last = _share(piece, pieces, blocks)
        _gated_product(j, first, last, blocks, hidden, w[LayerWord.GATE_UP], w[LayerWord.GATE_UP_BIAS], j[Word.ACT], scratch)
    elif phase == Phase.DOWN_DIGITS:
        _digits(j, j[Word.ACT], inner, first_row, last_row)
    else:
        blocks = hidden // 16
        first, last = _share(piece, pieces, blocks)
        _added_product(j, first, last, blocks, inner, w[LayerWord.DOWN], w[LayerWord.DOWN_BIAS], j[Word.RESIDUAL], scratch)


@njit(**OPTIONS)
def _head_piece(j, phase, piece, pieces):
    rows, hidden, num_exact = j[Word.NUM_ROWS], j[Word.HIDDEN], j[Word.NUM_EXACT]
    if phase == 0:
        first, last = _share(piece, pieces, rows)
        for row in range(first, last):
            values, corrections = j[Word.NORMED] + 4 * hidden * row, j[Word.CORRECTIONS] + 8 * row
            split_row(values, hidden, j[Word.DIGITS], j[Word.UNITS] + 4 * row, corrections, row)
        return
    blocks, block_bytes = j[Word.HEAD_BLOCKS], 16 * hidden + 64 + 64 * num_exact
    first, last = _share(piece, pieces, blocks)
    for block in range(first, last):
        for row in range(0, rows, MAX_ROWS):
            product_q8(
                j[Word.HEAD] + block * block_bytes, hidden, j[Word.DIGITS] + digits_at(row, hidden), j[Word.CORRECTIONS] + 8 * row,
                j[Word.EXACT] + 4 * num_exact * row, num_exact, j[Word.UNITS] + 4 * row, min(MAX_ROWS, rows - row),
                j[Word.OUT] + 64 * (blocks * row + block), 64 * blocks,
            )  # fmt: skip


@njit(**OPTIONS)
def _await(job, count):
    """Until so many pieces are done."""
    spins = 0
    while load_acquire(job + 8 * Word.DONE) < count:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            give_way()


@njit(**OPTIONS)
def _run_piece(job, j, number, scratch):
    per_layer = j[Word.PER_LAYER]
    layer, piece = number // per_layer, number % per_layer
    phase = 0
    while phase + 1 < NUM_PHASES and piece >= j[Word.STARTS + phase + 1]:
        phase += 1
    start = j[Word.STARTS + phase]
    pieces = j[Word.STARTS + phase + 1] - start
    _await(job, layer * per_layer + start)
    if j[Word.IS_HEAD]:
        _head_piece(j, phase, piece - start, pieces)
    elif layer == j[Word.NUM_LAYERS]:
        first, last = _share(piece, j[Word.TOTAL] - layer * per_layer, j[Word.NUM_ROWS])
        _tap(j, j[Word.TAP], first, last)
        _normalise(j, j[Word.FINAL_NORM], j[Word.OUT], first, last)
    else:
        words = carray(i64_at(j[Word.LAYERS] + 8 * LayerWord.COUNT * layer), (LayerWord.COUNT,))
        _layer_piece(j, words, phase, piece - start, pieces, scratch)


@njit("void(int64, int64, int64)", cache=_IS_KEPT, **OPTIONS)
def enter(job, semaphore, thread):
    """What a thread of a team does. Thread 0 runs the job whose words are filled in, the others help until stop is set."""
    j = carray(i64_at(job), (Word.COUNT,))
    if thread == 0:
        j[Word.GENERATION] += 1
        store_release(job + 8 * Word.DONE, 0)
        store_release(job + 8 * Word.TICKET, (j[Word.GENERATION] << 32) | j[Word.TOTAL])
        for _ in range(j[Word.NUM_HELPERS]):
            post(semaphore)
    while load_acquire(job + 8 * Word.STOP) == 0:
        if thread != 0:
            spins = 0
            while spins < _IDLE_SPINS and load_acquire(job + 8 * Word.TICKET) & _MANY == 0:
                spins += 1
                pause()
            if spins == _IDLE_SPINS:
                wait(semaphore)
        ticket = load_acquire(job + 8 * Word.TICKET)
        while ticket & _MANY:
            if replace_atomic(job + 8 * Word.TICKET, ticket, ticket - 1):
                _run_piece(job, j, j[Word.TOTAL] - (ticket & _MANY), j[Word.SCRATCH] + j[Word.SCRATCH_BYTES] * thread)
                add_atomic(job + 8 * Word.DONE, 1)
            ticket = load_acquire(job + 8 * Word.TICKET)
        if thread == 0:
            _await(job, j[Word.TOTAL])
            return
