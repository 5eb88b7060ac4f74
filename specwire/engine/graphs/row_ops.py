"""Sampling of rows of logits, in Triton: processors and filters for rows that ask, then the argmax with noise; log-probabilities of what was emitted.

Their torch twins are in `row_ops_torch`. Logits stay raw in memory: processors are applied where a kernel reads them. Programs of rows that ask
for nothing return at once.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs import tensors
from specwire.engine.graphs.tensors import RoundInputs, SlotState
from specwire.engine.kernels.gumbel_argmax import CHUNK, chunk_best, row_argmax
from specwire.engine.sampling.philox import MAX_UNIFORM, Stream

ADJUSTS, PENALISES, STOPS, FILTERS = (tl.constexpr(flag) for flag in (flags.ADJUSTS, flags.PENALISES, flags.STOPS, flags.FILTERS))
PROCESSES, REPORTS, ASKED = (tl.constexpr(number) for number in (flags.PROCESSES, flags.REPORTS, flags.ASKED))
DEAD = tl.constexpr(tensors.DEAD)
LOWEST = tl.constexpr(-2139095040)
"""`ordered` of the lowest finite number."""
WAYS = tl.constexpr(4)
"""Thresholds that one pass over a row tries."""
_BLOCK = 4096
"""Tokens that a program looks at at once."""


def find_cuts(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """See `row_ops_torch.find_cuts`. The masses of top-p are float32 sums of 4096 tokens each, added in float64: exact to about 1e-6."""
    find_cuts_kernel[(len(logits),)](
        logits, logits.stride(0), logits.shape[1], inputs.asks, inputs.temperatures, _about(state, inputs), inputs.cut_values, inputs.cut_ids,
        SEEN=state.seen_bit, STOP=state.stop_bit, BLOCK=_block(logits), num_warps=_warps(logits),
    )  # fmt: skip


def sample_targets(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> torch.Tensor:
    """See `row_ops_torch.sample_targets`."""
    num_rows, vocab_size = logits.shape
    chunk = min(CHUNK, max(16, triton.next_power_of_2(vocab_size)))
    num_chunks = triton.cdiv(vocab_size, chunk)
    best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    target_chunks[(num_chunks, num_rows)](
        logits, logits.stride(0), vocab_size, inputs.asks, inputs.temperatures, inputs.keys, inputs.indices, inputs.choices, _about(state, inputs),
        inputs.cut_values, inputs.cut_ids, best, best_token,
        SEEN=state.seen_bit, STOP=state.stop_bit, MAX_UNIFORM=MAX_UNIFORM, APPROXIMATE=logits.is_cuda, STREAM=int(Stream.TARGET), CHUNK=chunk,
        num_warps=8,
    )  # fmt: skip
    row_argmax[(num_rows,)](best, best_token, token_ids, num_chunks, BLOCK=triton.next_power_of_2(num_chunks), num_warps=1)
    return token_ids


def report_logprobs(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """See `row_ops_torch.report_logprobs`."""
    report_kernel[(len(logits),)](
        logits, logits.stride(0), logits.shape[1], inputs.asks, inputs.requests, inputs.slots, inputs.logit_starts,
        inputs.results, inputs.results.stride(0), state.asked, inputs.logprobs, inputs.logprob_ids,
        inputs.logprobs.stride(0), inputs.logprob_ids.stride(0), BLOCK=_block(logits), num_warps=_warps(logits),
    )  # fmt: skip


def _about(state: SlotState, inputs: RoundInputs) -> tuple[torch.Tensor, ...]:
    """What `process` reads of rows and slots."""
    return (
        inputs.requests, inputs.slots, inputs.logit_starts, inputs.logit_rows, inputs.indices, inputs.token_ids,
        state.asked, state.adjustments, state.words,
    )  # fmt: skip


def _block(logits: torch.Tensor) -> int:
    return min(_BLOCK, triton.next_power_of_2(logits.shape[1]))


def _warps(logits: torch.Tensor) -> int:
    return max(1, _block(logits) // 256)


@triton.jit
def process(z, column, real, row, asks, about, vocab_size, SEEN: tl.constexpr, STOP: tl.constexpr):
    """`row_ops_torch.process` of some columns; -inf in any step stays, so masks may come in any order."""
    requests, slots, logit_starts, logit_rows, indices, token_ids, asked, adjustments, words = about
    raw = z
    request = tl.load(requests + row)
    slot = tl.load(slots + request).to(tl.int64)
    numbers = asked + slot * ASKED
    if (asks & ADJUSTS) != 0:
        z += tl.load(adjustments + slot * vocab_size + column, real, 0.0)
    is_below_min = ((asks & STOPS) != 0) & (tl.load(indices + row) < tl.load(numbers + 7))
    penalises = (asks & PENALISES) != 0
    if penalises | is_below_min:
        word = tl.load(words + slot * vocab_size + column, real, 0).to(tl.int32)
        if penalises:
            count = word & (STOP - 1)
            last_draft = token_ids + tl.load(logit_rows + row)
            for back in range(row - tl.load(logit_starts + request)):
                count += (column == tl.load(last_draft - back)).to(tl.int32)
            repetition = tl.load(numbers + 4).to(tl.float32, bitcast=True)
            penalised = tl.where(z > 0.0, tl.div_rn(z, repetition), z * repetition)
            z = tl.where(((word & SEEN) != 0) | (count > 0), penalised, z)
            z -= tl.load(numbers + 5).to(tl.float32, bitcast=True) * count.to(tl.float32)
            z -= tl.where(count > 0, tl.load(numbers + 6).to(tl.float32, bitcast=True), 0.0)
        if is_below_min:
            z = tl.where((word & STOP) != 0, float("-inf"), z)
    return tl.where(raw < float("inf"), z, raw)


@triton.jit
def load_z(source, column, row, asks, about, vocab_size, SEEN: tl.constexpr, STOP: tl.constexpr):
    """Processed logits; +inf for a NaN, so that a bad row ends as one with infinity."""
    real = column < vocab_size
    z = tl.load(source + column, real, float("-inf"))
    z = tl.where(z == z, z, float("inf"))
    if (asks & PROCESSES) != 0:
        z = process(z, column, real, row, asks, about, vocab_size, SEEN, STOP)
    return z


@triton.jit
def target_chunks(
    logits,
    row_stride,
    vocab_size,
    row_asks,
    temperatures,
    keys,
    indices,
    choices,
    about,
    cut_values,
    cut_ids,
    best,
    best_token,
    SEEN: tl.constexpr,
    STOP: tl.constexpr,
    MAX_UNIFORM: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    STREAM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (chunks, rows)."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    block = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    column = 4 * block[:, None] + tl.arange(0, 4)[None, :]
    asks = tl.load(row_asks + row)
    z = load_z(logits + row.to(tl.int64) * row_stride, column, row, asks, about, vocab_size, SEEN, STOP)
    if (asks & FILTERS) != 0:
        cut = tl.load(cut_values + row)
        kept = (z > cut) | ((z == cut) & (column <= tl.load(cut_ids + row))) | (z == float("inf"))
        z = tl.where(kept, z, float("-inf"))
    value, token = chunk_best(z, block, row, temperatures, keys, indices, choices, STREAM, MAX_UNIFORM, APPROXIMATE)
    tl.store(best + row * tl.num_programs(0) + chunk, value)
    tl.store(best_token + row * tl.num_programs(0) + chunk, token)


@triton.jit
def ordered(z):
    """An int32 that orders as the number does; 0 and -0 are one."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The number that has this `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def find_cuts_kernel(
    logits,
    row_stride,
    vocab_size,
    row_asks,
    temperatures,
    about,
    cut_values,
    cut_ids,
    SEEN: tl.constexpr,
    STOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows). A support is all tokens from some (number, id) up in the order of falling number, then rising id; each filter raises it."""
    row = tl.program_id(0)
    asks = tl.load(row_asks + row)
    if (asks & FILTERS) == 0:
        return
    source = logits + row.to(tl.int64) * row_stride
    numbers = about[6] + tl.load(about[1] + tl.load(about[0] + row)).to(tl.int64) * ASKED
    temperature = tl.load(temperatures + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        best = tl.maximum(best, load_z(source, begin + tl.arange(0, BLOCK), row, asks, about, vocab_size, SEEN, STOP))
    z_max = tl.max(best, 0)
    high = ordered(z_max).to(tl.int64)

    # min-p: the least float32 that is not below the bound.
    bound = z_max.to(tl.float64) + temperature.to(tl.float64) * tl.load(numbers + 3).to(tl.float32, bitcast=True).to(tl.float64)
    rounded = bound.to(tl.float32)
    low = ordered(rounded).to(tl.int64) + (rounded.to(tl.float64) < bound).to(tl.int64)
    low = tl.minimum(tl.maximum(low, LOWEST), high)
    low_id = vocab_size
    num, mass = weigh(source, row, asks, about, vocab_size, z_max, temperature, low, low_id, SEEN, STOP, BLOCK)

    top_k = tl.load(numbers + 1)
    top_p = tl.load(numbers + 2).to(tl.float32, bitcast=True)
    if top_k < num:
        low, low_id = search(
            source, row, asks, about, vocab_size, z_max, temperature, low, low_id, high, num, top_k.to(tl.float64), False, SEEN, STOP, BLOCK
        )
        if top_p < 1.0:
            num, mass = weigh(source, row, asks, about, vocab_size, z_max, temperature, low, low_id, SEEN, STOP, BLOCK)
    if top_p < 1.0:
        # All tokens below this together have less than 1 - top_p of the best token's mass.
        floor = ordered(z_max - temperature * (tl.log(vocab_size / (1.0 - top_p)) + 0.01)).to(tl.int64)
        if floor > low:
            low = floor
            low_id = vocab_size
        target = top_p.to(tl.float64) * mass
        low, low_id = search(source, row, asks, about, vocab_size, z_max, temperature, low, low_id, high, num, target, True, SEEN, STOP, BLOCK)
    tl.store(cut_values + row, unordered(low.to(tl.int32)))
    tl.store(cut_ids + row, low_id)


@triton.jit
def weigh(source, row, asks, about, vocab_size, z_max, temperature, low, low_id, SEEN: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """(number, mass) of the tokens from (low, low_id) up; masses are relative to that of the best token."""
    num = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    for begin in range(0, vocab_size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = load_z(source, column, row, asks, about, vocab_size, SEEN, STOP)
        key = ordered(z).to(tl.int64)
        inside = (key > low) | ((key == low) & (column <= low_id) & (column < vocab_size))
        num += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, tl.exp((z - z_max) / temperature), 0.0), 0).to(tl.float64)
    return num, mass


@triton.jit
def search(
    source,
    row,
    asks,
    about,
    vocab_size,
    z_max,
    temperature,
    low,
    low_id,
    high,
    num_low,
    target,
    BY_MASS: tl.constexpr,
    SEEN: tl.constexpr,
    STOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(key, id) where the shortest first part of the tokens from (low, low_id) up ends whose number or mass is at least `target`.

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
        for begin in range(0, vocab_size, BLOCK):
            z = load_z(source, begin + tl.arange(0, BLOCK), row, asks, about, vocab_size, SEEN, STOP)
            reaches = ordered(z)[:, None] >= threshold.to(tl.int32)[None, :]
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
            each = tl.exp((unordered(low.to(tl.int32)) - z_max) / temperature).to(tl.float64)
        needed = tl.maximum(tl.minimum(tl.ceil((target - above) / each), num_ties.to(tl.float64)), 1.0).to(tl.int32)
        if needed < num_ties:
            before = tl.zeros([], tl.int32)
            for begin in range(0, vocab_size, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                tied = ordered(load_z(source, column, row, asks, about, vocab_size, SEEN, STOP)).to(tl.int64) == low
                is_last = tied & (before + tl.cumsum(tied.to(tl.int32), 0) == needed)
                last_id = tl.minimum(last_id, tl.min(tl.where(is_last, column, vocab_size), 0))
                before += tl.sum(tied.to(tl.int32), 0)
    return low, last_id


@triton.jit
def report_kernel(
    logits,
    row_stride,
    vocab_size,
    row_asks,
    requests,
    slots,
    logit_starts,
    results,
    results_stride,
    asked,
    logprobs,
    logprob_ids,
    logprobs_stride,
    ids_stride,
    BLOCK: tl.constexpr,
):
    """Grid (rows). The likeliest tokens are found one after the other, a pass over the row each."""
    row = tl.program_id(0)
    if (tl.load(row_asks + row) & REPORTS) == 0:
        return
    request = tl.load(requests + row)
    position = row - tl.load(logit_starts + request)
    result = results + request * results_stride
    first = tl.load(result)
    if (first == DEAD) | (position >= tl.where(first < 0, -1 - first, first + 1)):
        return
    source = logits + row.to(tl.int64) * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(source + column, column < vocab_size, float("-inf")))
    z_max = tl.max(best, 0)
    total = tl.zeros([], tl.float64)
    for begin in range(0, vocab_size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.exp(tl.load(source + column, column < vocab_size, float("-inf")) - z_max), 0).to(tl.float64)
    log_total = z_max + tl.log(total.to(tl.float32))
    tl.store(logprobs + row * logprobs_stride, tl.load(source + tl.load(result + 1 + position)) - log_total)

    last_value = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for rank in range(tl.load(asked + tl.load(slots + request).to(tl.int64) * ASKED + 8)):
        value = tl.full([BLOCK], float("-inf"), tl.float32)
        token = tl.full([BLOCK], 2147483647, tl.int32)
        for begin in range(0, vocab_size, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            z = tl.load(source + column, column < vocab_size, float("-inf"))
            follows = (column < vocab_size) & ((z < last_value) | ((z == last_value) & (column > last_id)))
            take = follows & ((z > value) | (token == 2147483647))
            value = tl.where(take, z, value)
            token = tl.where(take, column, token)
        last_value = tl.max(value, 0)
        last_id = tl.min(tl.where(value == last_value, token, 2147483647), 0)
        tl.store(logprobs + row * logprobs_stride + 1 + rank, last_value - log_total)
        tl.store(logprob_ids + row * ids_stride + rank, last_id)
