"""The memory that the threads of a forward pass share: int64 words by number, most of them addresses."""

from enum import IntEnum, auto

NUM_PHASES = 10


class Word(IntEnum):
    """Words of a job. Ticket and done are written by all threads and lie in cache lines of their own."""

    TICKET = 0  # generation * 2^32 + pieces that nobody has taken
    DONE = 8  # pieces that are finished
    STOP = 16  # helpers end
    GENERATION = 17
    TOTAL = 18  # pieces
    IS_HEAD = 19
    NUM_HELPERS = 20
    NUM_ROWS = 21  # T
    NUM_LAYERS = auto()
    HIDDEN = auto()
    INNER = auto()
    HEADS = auto()
    KV_HEADS = auto()
    DIM = auto()
    LAYERS = auto()  # address of [num_layers, len(LayerWord)]
    FLOATS = auto()  # address of float32 [epsilon of norms, scale of scores]
    FINAL_NORM = auto()
    COS = auto()  # float32 [max_position_embeddings, dim]
    SIN = auto()
    POSITIONS = auto()  # [T]
    SLOTS = auto()  # [T]
    ROW_GROUPS = auto()  # [row groups, 3] first row, number of rows, address of the sequence's block table
    BLOCK_SIZE = auto()
    RESIDUAL = auto()  # float32 [T, hidden]
    NORMED = auto()  # float32 [T, hidden]
    QKV = auto()  # float32 [T, (heads + 2 * kv_heads) * dim]
    ATTENDED = auto()  # float32 [T, heads * dim]
    ACT = auto()  # float32 [T, inner]
    DIGITS = auto()  # int8 [T / 6, 2, widest / 32, 6, 32], as those below in fewer groups where a row is narrower
    NUMBERS = auto()  # float32 [T / 6, widest / 32, 2, 6]
    UNITS = auto()  # float32 [T], of the head's digits, or of halves
    FINE = auto()  # int64 [T, words], bits of groups that have two digits
    OUT = auto()  # float32 [T, hidden], or logits [T, 16 * head blocks]
    SCRATCH = auto()  # float32 [threads, scratch bytes / 4]
    SCRATCH_BYTES = auto()
    PER_LAYER = auto()  # pieces of a layer
    STARTS = 64  # [NUM_PHASES + 1] first piece of each phase of a layer
    HEAD_BLOCKS = 80  # of 16 tokens
    HEAD = auto()
    CORRECTIONS = auto()  # int32 [T, 2]
    EXACT = auto()  # float32 [T, num_exact]
    NUM_EXACT = auto()
    TAP = auto()  # float32 [T, hidden], or 0: takes what leaves the last layer
    HALVES = auto()  # float16 [width / 32, T, 32, 2], each number twice
    HEAD_FEATURES = auto()
    DRAFT = auto()  # words of a call of drafting
    COUNT = auto()


class LayerWord(IntEnum):
    """Words of a layer; 0 where it has no such thing. Norms and biases are float32."""

    INPUT_NORM = 0
    QKV = 1
    QKV_BIAS = 2
    Q_NORM = 3
    K_NORM = 4
    O = 5  # noqa: E741 (the projection's name)
    O_BIAS = 6
    POST_NORM = 7
    GATE_UP = 8
    GATE_UP_BIAS = 9
    DOWN = 10
    DOWN_BIAS = 11
    KV = 12
    TAP = 13  # float32 [T, hidden]: takes what enters the layer
    IS_FIRST = 14  # it reads embedding and feature side by side: a draft head's
    COUNT = 15


class Phase(IntEnum):
    """Of a layer, in order; what a phase reads is complete when it starts."""

    INPUT_NORM = 0
    QKV = 1
    ROTATE = 2
    ATTEND = 3
    O_ROWS = 4
    O = 5  # noqa: E741
    POST_NORM = 6
    GATE_UP = 7
    DOWN_ROWS = 8
    DOWN = 9


FINE_WORDS = 32
"""Words of 64 groups that a row may have."""
SCRATCH_HEADER = 12 * 64
"""Floats of a thread's scratch before those of attention: results of a product of twelve rows and 64 features, or bits of groups and results of
two products of six rows and 16 features."""
