"""Forward passes in pieces that threads take one after another, and the loops of those threads.

A piece starts when all pieces of earlier phases are done. A thread that comes late, or loses its core, delays only the piece that it has:
nobody waits for a thread, only for work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import carray, njit

from specwire.engine.cpu.intrinsics import add_atomic, give_way, i64_at, load_acquire, pause, post, replace_atomic, store_release, wait
from specwire.engine.cpu.job import NUM_PHASES, LayerWord, Phase, Word
from specwire.engine.cpu.kernels import OPTIONS
from specwire.engine.cpu.pieces import attend_rows, normalise_rows, rotate_rows, share, tap

SIGNATURE = "void(int64, int64, int64)"
_MANY = (1 << 32) - 1
_SPINS = 60
"""Pauses, of some 50 ns, before a thread that waits offers its core to others."""
_IDLE_SPINS = 400
"""Pauses of a helper without work before it sleeps: the head follows the layers at once."""


@dataclass(frozen=True, slots=True)
class Products:
    """Compiled functions that know how weights are kept; j are a job's words, scratch the address of a thread's own memory.

    A product's arguments are j, piece, pieces, features (of gate, for gated), width of the rows that are prepared, addresses of weight, of bias
    (0 = none) and of the result, scratch.
    """

    name: str  # of the form, in the names of what is compiled for it
    prepare: Any  # j, source, width, first, last: puts those rows of source [T, width] into the form that products read
    plain: Any
    added: Any  # to what the result has
    gated: Any  # silu(gate) * up
    head: Any  # j, phase (0: prepares rows, 1: multiplies), piece, pieces, scratch


def compiled_for(name: str) -> Callable[[Any], Any]:
    """A decorator for functions that are made once for each form of weights: compiles one, with the form in its name.

    Numba tells functions of the same name apart by a number that it counts anew in each process. Code that is kept and was compiled in two
    processes can meet in a third; of two functions with the same name and number the machine code that came first then runs in place of both.
    """

    def compile_named(function: Any) -> Any:
        function.__qualname__ = f"{function.__qualname__}_{name}"
        return njit(**OPTIONS)(function)

    return compile_named


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


def make_layer_piece(products: Products) -> Any:
    """A piece of a decoder layer: (j, words of the layer, phase, piece, pieces, scratch)."""
    prepare, plain, added, gated = products.prepare, products.plain, products.added, products.gated

    @compiled_for(products.name)
    def layer_piece(j, w, phase, piece, pieces, scratch):
        hidden, inner, dim = j[Word.HIDDEN], j[Word.INNER], j[Word.DIM]
        qkv_width, attended_width = (j[Word.HEADS] + 2 * j[Word.KV_HEADS]) * dim, j[Word.HEADS] * dim
        first_row, last_row = share(piece, pieces, j[Word.NUM_ROWS])
        if phase == Phase.INPUT_NORM:
            tap(j, w[LayerWord.TAP], first_row, last_row)
            normalise_rows(j, w[LayerWord.INPUT_NORM], j[Word.NORMED], first_row, last_row)
            prepare(j, j[Word.NORMED], hidden, first_row, last_row)
        elif phase == Phase.QKV:
            plain(j, piece, pieces, qkv_width, hidden, w[LayerWord.QKV], w[LayerWord.QKV_BIAS], j[Word.QKV], scratch)
        elif phase == Phase.ROTATE:
            rotate_rows(j, w, first_row, last_row)
        elif phase == Phase.ATTEND:
            attend_rows(j, w, piece, scratch)
        elif phase == Phase.O_ROWS:
            prepare(j, j[Word.ATTENDED], attended_width, first_row, last_row)
        elif phase == Phase.O:
            added(j, piece, pieces, hidden, attended_width, w[LayerWord.O], w[LayerWord.O_BIAS], j[Word.RESIDUAL], scratch)
        elif phase == Phase.POST_NORM:
            normalise_rows(j, w[LayerWord.POST_NORM], j[Word.NORMED], first_row, last_row)
            prepare(j, j[Word.NORMED], hidden, first_row, last_row)
        elif phase == Phase.GATE_UP:
            gated(j, piece, pieces, inner, hidden, w[LayerWord.GATE_UP], w[LayerWord.GATE_UP_BIAS], j[Word.ACT], scratch)
        elif phase == Phase.DOWN_ROWS:
            prepare(j, j[Word.ACT], inner, first_row, last_row)
        else:
            added(j, piece, pieces, hidden, inner, w[LayerWord.DOWN], w[LayerWord.DOWN_BIAS], j[Word.RESIDUAL], scratch)

    return layer_piece


def make_loop(name: str, layer_piece: Any, head_piece: Any) -> Any:
    """What a thread of a team does, compiled with what calls it: (job, semaphore, thread). Thread 0 runs the job whose words are filled in, the
    others help until stop is set.

    Args:
        name: as `Products.name`.
        layer_piece: as `make_layer_piece` gives it.
        head_piece: as `Products.head`.
    """

    @compiled_for(name)
    def run_piece(job, j, number, scratch):
        per_layer = j[Word.PER_LAYER]
        layer, piece = number // per_layer, number % per_layer
        phase = 0
        while phase + 1 < NUM_PHASES and piece >= j[Word.STARTS + phase + 1]:
            phase += 1
        start = j[Word.STARTS + phase]
        pieces = j[Word.STARTS + phase + 1] - start
        _await(job, layer * per_layer + start)
        if j[Word.IS_HEAD]:
            head_piece(j, phase, piece - start, pieces, scratch)
        elif layer == j[Word.NUM_LAYERS]:
            first, last = share(piece, j[Word.TOTAL] - layer * per_layer, j[Word.NUM_ROWS])
            tap(j, j[Word.TAP], first, last)
            normalise_rows(j, j[Word.FINAL_NORM], j[Word.OUT], first, last)
        else:
            words = carray(i64_at(j[Word.LAYERS] + 8 * LayerWord.COUNT * layer), (LayerWord.COUNT,))
            layer_piece(j, words, phase, piece - start, pieces, scratch)

    @compiled_for(name)
    def loop(job, semaphore, thread):
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
                    run_piece(job, j, j[Word.TOTAL] - (ticket & _MANY), j[Word.SCRATCH] + j[Word.SCRATCH_BYTES] * thread)
                    add_atomic(job + 8 * Word.DONE, 1)
                ticket = load_acquire(job + 8 * Word.TICKET)
            if thread == 0:
                _await(job, j[Word.TOTAL])
                return

    return loop
