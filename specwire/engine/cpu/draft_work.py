"""Drafting with a head that drafts token by token, as a job: a pass over committed rows, then one for each further draft, without Python in between.

A pass is two jobs of the team: the layers over all rows, and what follows over the rows with an output. Between them the thread that called
decides which rows there are.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from specwire.engine.cpu.draft_choice import draw
from specwire.engine.cpu.draft_job import DraftWord, SequenceWord
from specwire.engine.cpu.intrinsics import f32_of_bits, i64_at, u16_at
from specwire.engine.cpu.job import NUM_PHASES, SCRATCH_HEADER, LayerWord, Phase, Word
from specwire.engine.cpu.kernels import OPTIONS, copy, f32, normalise
from specwire.engine.cpu.pieces import share
from specwire.engine.cpu.work import Products, compiled_for, make_layer_piece, make_loop

_CHOOSE = 2
"""The last phase of what follows the layers; `Products.head` has the two before it."""


@njit(**OPTIONS)
def _words(j):
    return carray(i64_at(j[Word.DRAFT]), (DraftWord.COUNT,))


@njit(**OPTIONS)
def _sequence(d, number):
    return carray(i64_at(d[DraftWord.SEQUENCES] + 8 * SequenceWord.COUNT * number), (SequenceWord.COUNT,))


@njit(**OPTIONS)
def _output(d, number):
    """Row and sequence."""
    return carray(i64_at(d[DraftWord.OUTPUTS] + 16 * number), (2,))


@njit(**OPTIONS)
def _begin_rows(j, w, first, last):
    """What the first layer reads, [rows, 2 * hidden]: norms of embedding and feature. The residual stream begins with the feature."""
    d, hidden, eps = _words(j), j[Word.HIDDEN], f32(j[Word.FLOATS], 2)[0]
    tokens, features = carray(i64_at(d[DraftWord.TOKENS]), (last,)), carray(i64_at(d[DraftWord.FEATURE_AT]), (last,))
    for row in range(first, last):
        target = j[Word.NORMED] + 8 * hidden * row
        bits, x = carray(u16_at(d[DraftWord.EMBEDDING] + 2 * hidden * tokens[row]), (hidden,)), f32(target, hidden)
        for i in range(hidden):
            x[i] = f32_of_bits(np.int32(bits[i]) << np.int32(16))
        normalise(target, w[LayerWord.INPUT_NORM], target, hidden, eps)
        normalise(features[row], d[DraftWord.HIDDEN_NORM], target + 4 * hidden, hidden, eps)
        copy(target + 4 * hidden if d[DraftWord.IS_NORM_RESIDUAL] else features[row], j[Word.RESIDUAL] + 4 * hidden * row, hidden)


@njit(**OPTIONS)
def _end_rows(j, first, last):
    """What the head reads of rows with an output, and what their sequences carry on."""
    d, hidden = _words(j), j[Word.HIDDEN]
    columns = carray(i64_at(d[DraftWord.EXACT_COLUMNS]), (j[Word.NUM_EXACT],))
    for number in range(first, last):
        output = _output(d, number)
        residual, normed = j[Word.RESIDUAL] + 4 * hidden * output[0], j[Word.NORMED] + 4 * hidden * number
        normalise(residual, j[Word.FINAL_NORM], normed, hidden, f32(j[Word.FLOATS], 2)[0])
        copy(normed if d[DraftWord.IS_NORM_CARRIED] else residual, d[DraftWord.CARRY] + 4 * hidden * output[1], hidden)
        x, exact = f32(normed, hidden), f32(j[Word.EXACT] + 4 * len(columns) * number, len(columns))
        for i in range(len(columns)):
            exact[i] = x[columns[i]]


@njit(**OPTIONS)
def _choose(j, number, scratch):
    d = _words(j)
    sequence = _output(d, number)[1]
    s, position, passes = _sequence(d, sequence), d[DraftWord.POSITION], d[DraftWord.NUM_PASSES]
    # Row i predicts the token at i + 2.
    index = s[SequenceWord.START] + s[SequenceWord.NUM_ROWS] + 1 + position
    token, prob = draw(
        j[Word.OUT] + 4 * d[DraftWord.ROW_WIDTH] * number, d[DraftWord.NUM_IDS], d[DraftWord.TARGET_IDS],
        f32(d[DraftWord.TEMPERATURES], sequence + 1)[sequence], index, s[SequenceWord.CHOICE], s[SequenceWord.KEY], d[DraftWord.NUM_GROUPS],
        d[DraftWord.NOISE_BLOCKS], d[DraftWord.GROUP_STARTS], d[DraftWord.NOISE_COLUMNS], scratch + 4 * SCRATCH_HEADER,
    )  # fmt: skip
    place = passes * sequence + position
    carray(i64_at(d[DraftWord.DRAFTS]), (place + 1,))[place] = token
    f32(d[DraftWord.PROBS], place + 1)[place] = prob


@njit(**OPTIONS)
def _place_row(j, row, s, position):
    """Where a row stands in its sequence and in the cache."""
    size = j[Word.BLOCK_SIZE]
    block = position // size
    table = carray(i64_at(s[SequenceWord.TABLE]), (block + 1,))
    carray(i64_at(j[Word.POSITIONS]), (row + 1,))[row] = position
    carray(i64_at(j[Word.SLOTS]), (row + 1,))[row] = table[block] * size + position % size


@njit(**OPTIONS)
def _group_rows(j, group, row, count, table):
    rows = carray(i64_at(j[Word.ROW_GROUPS] + 24 * group), (3,))
    rows[0], rows[1], rows[2] = row, count, table


@njit(**OPTIONS)
def _take_committed(j, d):
    """The rows of the first pass. Returns their number and that of groups of attention."""
    hidden, most = j[Word.HIDDEN], d[DraftWord.ROWS_PER_GROUP]
    total, groups = 0, 0
    for number in range(d[DraftWord.NUM_SEQUENCES]):
        s = _sequence(d, number)
        first, count = s[SequenceWord.FIRST_ROW], s[SequenceWord.NUM_ROWS]
        features = carray(i64_at(d[DraftWord.FEATURE_AT]), (first + count,))
        for index in range(count):
            features[first + index] = d[DraftWord.FEATURES] + 4 * hidden * (first + index)
            _place_row(j, first + index, s, s[SequenceWord.START] + index)
        parts = (count + most - 1) // most
        for part in range(parts):
            begin, end = share(part, parts, count)
            _group_rows(j, groups + part, first + begin, end - begin, s[SequenceWord.TABLE])
        output = _output(d, number)
        output[0], output[1] = first + count - 1, number
        total, groups = first + count, groups + parts
    d[DraftWord.NUM_OUTPUTS] = d[DraftWord.NUM_SEQUENCES]
    return total, groups


@njit(**OPTIONS)
def _take_drafted(j, d, position):
    """A row for each sequence that wants more drafts: its last one, over what it carries on. Returns how many."""
    hidden, count = j[Word.HIDDEN], 0
    for number in range(d[DraftWord.NUM_OUTPUTS]):
        sequence = _output(d, number)[1]
        s = _sequence(d, sequence)
        if s[SequenceWord.NUM_DRAFTS] <= position:
            continue
        place = d[DraftWord.NUM_PASSES] * sequence + position - 1
        carray(i64_at(d[DraftWord.TOKENS]), (count + 1,))[count] = carray(i64_at(d[DraftWord.DRAFTS]), (place + 1,))[place]
        carray(i64_at(d[DraftWord.FEATURE_AT]), (count + 1,))[count] = d[DraftWord.CARRY] + 4 * hidden * sequence
        _place_row(j, count, s, s[SequenceWord.START] + s[SequenceWord.NUM_ROWS] - 1 + position)
        _group_rows(j, count, count, 1, s[SequenceWord.TABLE])
        output = _output(d, count)
        output[0], output[1] = count, sequence
        count += 1
    d[DraftWord.NUM_OUTPUTS] = count
    return count


@njit(**OPTIONS)
def _num_row_pieces(j, d, rows):
    if rows <= d[DraftWord.FEW_ROWS]:
        return min(rows, 1 + j[Word.NUM_HELPERS])
    return (rows + d[DraftWord.ROWS_PER_PIECE] - 1) // d[DraftWord.ROWS_PER_PIECE]


@njit(**OPTIONS)
def _plan_layers(j, d, rows, groups):
    row_pieces = _num_row_pieces(j, d, rows)
    most = (1 + j[Word.NUM_HELPERS]) * (d[DraftWord.FEW_PIECES] if rows <= d[DraftWord.FEW_ROWS] else d[DraftWord.MANY_PIECES])
    parts, start = carray(i64_at(d[DraftWord.PARTS]), (NUM_PHASES,)), 0
    for phase in range(NUM_PHASES):
        j[Word.STARTS + phase] = start
        if phase == Phase.ATTEND:
            start += groups * j[Word.KV_HEADS]
        else:
            start += min(parts[phase], most) if parts[phase] else row_pieces
    j[Word.STARTS + NUM_PHASES] = start
    j[Word.IS_HEAD], j[Word.NUM_ROWS], j[Word.PER_LAYER], j[Word.TOTAL] = 0, rows, start, j[Word.NUM_LAYERS] * start


@njit(**OPTIONS)
def _plan_head(j, d):
    rows = d[DraftWord.NUM_OUTPUTS]
    row_pieces, parts = _num_row_pieces(j, d, rows), min(d[DraftWord.HEAD_PARTS], (1 + j[Word.NUM_HELPERS]) * d[DraftWord.MANY_PIECES])
    total = row_pieces + parts + rows
    for phase in range(NUM_PHASES + 1):
        j[Word.STARTS + phase] = total
    j[Word.STARTS], j[Word.STARTS + 1], j[Word.STARTS + _CHOOSE] = 0, row_pieces, row_pieces + parts
    j[Word.IS_HEAD], j[Word.NUM_ROWS], j[Word.PER_LAYER], j[Word.TOTAL] = 1, rows, total, total


def make_draft_loop(products: Products) -> Any:
    """As `make_loop`; thread 0 runs a whole call of drafting."""
    prepare, plain, head = products.prepare, products.plain, products.head
    decoder_piece = make_layer_piece(products)

    @compiled_for(products.name)
    def layer_piece(j, w, phase, piece, pieces, scratch):
        is_first = w[LayerWord.IS_FIRST]
        if is_first and phase == Phase.INPUT_NORM:
            first, last = share(piece, pieces, j[Word.NUM_ROWS])
            _begin_rows(j, w, first, last)
            prepare(j, j[Word.NORMED], 2 * j[Word.HIDDEN], first, last)
        elif is_first and phase == Phase.QKV:
            width = (j[Word.HEADS] + 2 * j[Word.KV_HEADS]) * j[Word.DIM]
            plain(j, piece, pieces, width, 2 * j[Word.HIDDEN], w[LayerWord.QKV], w[LayerWord.QKV_BIAS], j[Word.QKV], scratch)
        else:
            decoder_piece(j, w, phase, piece, pieces, scratch)

    @compiled_for(products.name)
    def head_piece(j, phase, piece, pieces, scratch):
        if phase == _CHOOSE:
            _choose(j, piece, scratch)
            return
        if phase == 0:
            first, last = share(piece, pieces, j[Word.NUM_ROWS])
            _end_rows(j, first, last)
        head(j, phase, piece, pieces, scratch)

    loop = make_loop(products.name, layer_piece, head_piece)

    @compiled_for(products.name)
    def draft_loop(job, semaphore, thread):
        if thread != 0:
            loop(job, semaphore, thread)
            return
        j = carray(i64_at(job), (Word.COUNT,))
        d = _words(j)
        rows, groups = _take_committed(j, d)
        _plan_layers(j, d, rows, groups)
        loop(job, semaphore, 0)
        for position in range(d[DraftWord.NUM_PASSES]):
            d[DraftWord.POSITION] = position
            if position:
                rows = _take_drafted(j, d, position)
                _plan_layers(j, d, rows, rows)
                loop(job, semaphore, 0)
            _plan_head(j, d)
            loop(job, semaphore, 0)

    return draft_loop
