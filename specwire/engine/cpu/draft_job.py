"""What a call of drafting shares beside a job's words: int64 by number, most of them addresses."""

from enum import IntEnum, auto


class DraftWord(IntEnum):
    """Words of a call; S sequences, T rows in its first pass, R of them with an output."""

    NUM_SEQUENCES = 0
    NUM_PASSES = auto()  # most drafts of a sequence; 0 = only keys and values of the first pass are wanted
    SEQUENCES = auto()  # int64 [S, len(SequenceWord)]
    TOKENS = auto()  # int64 [T]
    FEATURES = auto()  # float32 [T, hidden], of the first pass
    TEMPERATURES = auto()  # float32 [S], 0 = greedy
    DRAFTS = auto()  # int64 [S, NUM_PASSES], the target's ids
    PROBS = auto()  # float32 [S, NUM_PASSES]
    FEATURE_AT = auto()  # int64 [T], addresses of the rows' features
    CARRY = auto()  # float32 [S, hidden], what stands for the next feature of a sequence
    OUTPUTS = auto()  # int64 [R, 2] row with an output, its sequence
    NUM_OUTPUTS = auto()  # R
    POSITION = auto()  # of the drafts of this pass, from 0
    ROWS_PER_GROUP = auto()
    FEW_ROWS = auto()  # up to which rows are dealt out evenly, and products into few pieces
    ROWS_PER_PIECE = auto()
    FEW_PIECES = auto()
    MANY_PIECES = auto()
    PARTS = auto()  # int64 [NUM_PHASES], into which a product of a phase can be divided; 0 = it has rows
    HEAD_PARTS = auto()
    EMBEDDING = auto()  # bfloat16 [ids of the target, hidden]
    HIDDEN_NORM = auto()  # float32 [hidden]
    IS_NORM_RESIDUAL = auto()  # the residual stream starts with the normalised feature
    IS_NORM_CARRIED = auto()  # the next feature is normalised
    EXACT_COLUMNS = auto()  # int64 [exact columns of the head]
    NUM_IDS = auto()  # that can be drafted
    ROW_WIDTH = auto()  # of logits
    TARGET_IDS = auto()  # int64 [NUM_IDS]
    NUM_GROUPS = auto()  # of 16 blocks of noise
    NOISE_BLOCKS = auto()  # int64 [NUM_GROUPS, 16], counters
    GROUP_STARTS = auto()  # int64 [NUM_GROUPS + 1], first of a group's columns in NOISE_COLUMNS
    NOISE_COLUMNS = auto()  # int64 [NUM_IDS, 2] column of logits, which of a group's 64 words is its noise
    COUNT = auto()


class SequenceWord(IntEnum):
    """Words of a sequence."""

    FIRST_ROW = 0  # in the first pass
    NUM_ROWS = auto()
    START = auto()  # position of the first row
    TABLE = auto()  # address of its blocks, int64
    NUM_DRAFTS = auto()
    KEY = auto()
    CHOICE = auto()
    COUNT = auto()
