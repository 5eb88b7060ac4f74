"""Where the support of a row ends that asks for min-p, top-k or top-p, in Triton; the twin is `row_ops_torch.find_cuts`.

A support is all tokens from some (number, id) up in the order of falling number, then rising id; each filter raises it. Numbers are searched by
their ordered bits, so that the search ends at the very number, among few candidates that the first passes over the row have copied out.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs.processing import load_z, read_by_process
from specwire.engine.graphs.tensors import RoundInputs, SlotState

FILTERS, ASKED = tl.constexpr(flags.FILTERS), tl.constexpr(flags.ASKED)
LOWEST = tl.constexpr(-2139095040)
"""`ordered` of the lowest finite number."""
WAYS = tl.constexpr(4)
"""Thresholds that one pass of a search tries."""
TOP_K_REACH = tl.constexpr(12.0)
"""How far below the best logit the candidates for top-k go at first; if they are too few, all tokens become candidates."""
_PROGRAMS = 128
"""Rows at a time: each program keeps candidates of its own, 8 bytes for each token of the vocabulary."""


def find_cuts(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """See `row_ops_torch.find_cuts`. The masses of top-p are float32 sums of up to 4096 tokens, added in float64: exact to about 1e-6."""
    block = block_of(logits)
    values, ids = candidates_of(logits)
    find_cuts_kernel[(len(values),)](
        logits, logits.stride(0), logits.shape[1], len(logits), inputs.asks, inputs.temperatures, read_by_process(state, inputs),
        values, ids, inputs.cut_values, inputs.cut_ids,
        SEEN=state.seen_bit, STOP=state.stop_bit, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


def candidates_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Place for the candidates of as many rows as are looked at together: numbers [P, V] float32 and ids [P, V] int32."""
    shape = (min(_PROGRAMS, len(logits)), logits.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=logits.device), torch.empty(shape, dtype=torch.int32, device=logits.device)


def block_of(logits: torch.Tensor) -> int:
    """How many tokens a program looks at at once."""
    return min(4096, triton.next_power_of_2(logits.shape[1]))


@triton.jit
def ordered(z):
    """An int64 that orders as the number does; 0 and -0 are one."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unordered(key):
    """The number that has this `ordered`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def find_cuts_kernel(
    logits,
    row_stride,
    vocab_size,
    num_rows,
    row_asks,
    temperatures,
    about,
    candidates,
    candidate_ids,
    cut_values,
    cut_ids,
    SEEN: tl.constexpr,
    STOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any grid of one dimension, as long as the candidates."""
    values = candidates + tl.program_id(0).to(tl.int64) * vocab_size
    ids = candidate_ids + tl.program_id(0).to(tl.int64) * vocab_size
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        asks = tl.load(row_asks + row)
        if (asks & FILTERS) != 0:
            source = logits + row * row_stride.to(tl.int64)
            low, low_id = cut_row(source, row, asks, tl.load(temperatures + row), about, vocab_size, values, ids, SEEN, STOP, BLOCK)
            tl.store(cut_values + row, unordered(low))
            tl.store(cut_ids + row, low_id)


@triton.jit
def cut_row(source, row, asks, temperature, about, vocab_size, values, ids, SEEN: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """(`ordered` number, id) where the row's support ends."""
    numbers = about[6] + tl.load(about[1] + tl.load(about[0] + row)).to(tl.int64) * ASKED
    top_k = tl.load(numbers + 1)
    top_p = tl.load(numbers + 2).to(tl.float32, bitcast=True)
    log_min_p = tl.load(numbers + 3).to(tl.float32, bitcast=True)

    z_max = find_max(source, row, asks, about, vocab_size, SEEN, STOP, BLOCK)
    high = ordered(z_max)

    # min-p: the least float32 that is not below the bound.
    bound = z_max.to(tl.float64) + temperature.to(tl.float64) * log_min_p.to(tl.float64)
    rounded = bound.to(tl.float32)
    low = tl.minimum(tl.maximum(ordered(rounded) + (rounded.to(tl.float64) < bound).to(tl.int64), LOWEST), high)
    low_id = vocab_size

    # All tokens below top-p's reach together have less than 1 - top_p of the best token's mass.
    reach = temperature * (tl.log(vocab_size / (1.0 - tl.minimum(top_p, 1.0 - 5.9604645e-08))) + 0.01)
    reach = tl.maximum(tl.where(top_p < 1.0, reach, 0.0), tl.where(top_k < vocab_size, TOP_K_REACH, 0.0))
    floor = tl.minimum(tl.maximum(ordered(z_max - reach), low), high)
    size = tl.zeros([], tl.int32)
    num = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    for attempt in range(2):
        if (attempt == 0) | ((top_k < num) & (size < top_k)):
            floor = tl.where(attempt == 0, floor, low)
            size, num, mass = gather(source, row, asks, temperature, about, vocab_size, values, ids, z_max, low, floor, SEEN, STOP, BLOCK)

    if top_k < num:
        low, low_id = search(values, ids, size, vocab_size, z_max, temperature, floor, low_id, high, size, top_k.to(tl.float64), False, BLOCK)
        if top_p < 1.0:
            mass = weigh(values, ids, size, z_max, temperature, low, low_id, BLOCK)
    if top_p < 1.0:
        low_id = tl.where(floor > low, vocab_size, low_id)
        low = tl.maximum(low, floor)
        low, low_id = search(values, ids, size, vocab_size, z_max, temperature, low, low_id, high, size, top_p.to(tl.float64) * mass, True, BLOCK)
    return low, low_id


@triton.jit
def find_max(source, row, asks, about, vocab_size, SEEN: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """The row's largest number."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        best = tl.maximum(best, load_z(source, begin + tl.arange(0, BLOCK), row, asks, about, vocab_size, SEEN, STOP))
    return tl.max(best, 0)


@triton.jit
def gather(
    source,
    row,
    asks,
    temperature,
    about,
    vocab_size,
    values,
    ids,
    z_max,
    low,
    floor,
    SEEN: tl.constexpr,
    STOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies tokens from `floor` up, by rising id; (their number, number and mass of all from `low` up), masses relative to the best token's."""
    size = tl.zeros([], tl.int32)
    num = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    tl.debug_barrier()  # other threads may still read what the last row left
    for begin in range(0, vocab_size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = load_z(source, column, row, asks, about, vocab_size, SEEN, STOP)
        key = ordered(z)
        inside = (key >= low) & (column < vocab_size)
        num += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, tl.exp((z - z_max) / temperature), 0.0), 0).to(tl.float64)
        chosen = (key >= floor) & (column < vocab_size)
        place = size + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(values + place, z, chosen)
        tl.store(ids + place, column, chosen)
        size += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()
    return size, num, mass


@triton.jit
def weigh(values, ids, size, z_max, temperature, low, low_id, BLOCK: tl.constexpr):
    """Mass of the candidates from (low, low_id) up."""
    mass = tl.zeros([], tl.float64)
    for begin in range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        z = tl.load(values + index, index < size, float("-inf"))
        key = ordered(z)
        inside = (index < size) & ((key > low) | ((key == low) & (tl.load(ids + index, index < size, 0) <= low_id)))
        mass += tl.sum(tl.where(inside, tl.exp((z - z_max) / temperature), 0.0), 0).to(tl.float64)
    return mass


@triton.jit
def search(
    values,
    ids,
    size,
    vocab_size,
    z_max,
    temperature,
    low,
    low_id,
    high,
    num_low,
    target,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(key, id) where the shortest first part of the candidates from (low, low_id) up ends whose number or mass is at least `target`.

    Narrows [low, high] while more than one token lies in it: from `low` up it is enough, behind `high` it is not. `num_low` may be too large.
    """
    first_low = low
    num_above = tl.zeros([], tl.int32)
    above = tl.zeros([], tl.float64)
    way = tl.arange(0, WAYS)
    while (low < high) & (num_low - num_above > 1):
        threshold = low + (way + 1).to(tl.int64) * ((high - low + WAYS) // (WAYS + 1))
        nums = tl.zeros([WAYS], tl.int32)
        weights = tl.zeros([WAYS], tl.float64)
        for begin in range(0, size, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            z = tl.load(values + index, index < size, float("-inf"))
            reaches = ordered(z).to(tl.int32)[:, None] >= threshold.to(tl.int32)[None, :]
            nums += tl.sum(reaches.to(tl.int32), 0)
            if BY_MASS:
                weight = tl.exp((z - z_max) / temperature)
                weights += tl.sum(tl.where(reaches, weight[:, None], 0.0), 0).to(tl.float64)
        if not BY_MASS:
            weights = nums.to(tl.float64)
        num_enough = tl.sum((weights >= target).to(tl.int32), 0)
        if num_enough > 0:
            low = tl.sum(tl.where(way == num_enough - 1, threshold, 0), 0)
            num_low = tl.sum(tl.where(way == num_enough - 1, nums, 0), 0)
        if num_enough < WAYS:
            high = tl.sum(tl.where(way == num_enough, threshold, 0), 0) - 1
            num_above = tl.sum(tl.where(way == num_enough, nums, 0), 0)
            above = tl.sum(tl.where(way == num_enough, weights, 0.0), 0)

    last_id = tl.where(low > first_low, vocab_size, low_id)
    num_ties = num_low - num_above
    if num_ties > 1:  # of one number: the first ids that are enough
        each = tl.full([], 1.0, tl.float64)
        if BY_MASS:
            each = tl.exp((unordered(low) - z_max) / temperature).to(tl.float64)
        needed = tl.maximum(tl.minimum(tl.ceil((target - above) / each), num_ties.to(tl.float64)), 1.0).to(tl.int32)
        if needed < num_ties:
            before = tl.zeros([], tl.int32)
            for begin in range(0, size, BLOCK):
                index = begin + tl.arange(0, BLOCK)
                tied = (ordered(tl.load(values + index, index < size, float("-inf"))) == low) & (index < size)
                is_last = tied & (before + tl.cumsum(tied.to(tl.int32), 0) == needed)
                last_id = tl.minimum(last_id, tl.min(tl.where(is_last, tl.load(ids + index, index < size, 0), vocab_size), 0))
                before += tl.sum(tied.to(tl.int32), 0)
    return low, last_id
