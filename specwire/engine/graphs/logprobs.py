"""Log-probabilities of emitted tokens and of the likeliest ones, in Triton; the twin is `row_ops_torch.report_logprobs`."""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs import tensors
from specwire.engine.graphs.filters import block_of, candidates_of, find_max, gather, ordered
from specwire.engine.graphs.processing import read_by_process
from specwire.engine.graphs.tensors import RoundInputs, SlotState

REPORTS, ASKED, DEAD = (tl.constexpr(number) for number in (flags.REPORTS, flags.ASKED, tensors.DEAD))
REACH = tl.constexpr(12.0)
"""How far below the best logit the candidates go at first; if they are too few, all tokens become candidates."""
NOTHING = tl.constexpr(0)
"""Asked of the logits: raw they are wanted."""
NOBODY = tl.constexpr(2147483647)


def report_logprobs(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """See `row_ops_torch.report_logprobs`."""
    block = block_of(logits)
    values, ids = candidates_of(logits)
    report_kernel[(len(values),)](
        logits, logits.stride(0), logits.shape[1], len(logits), inputs.asks, read_by_process(state, inputs), inputs.results, inputs.results.stride(0),
        values, ids, inputs.logprobs, inputs.logprob_ids, inputs.logprobs.stride(0), inputs.logprob_ids.stride(0),
        BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def report_kernel(
    logits,
    row_stride,
    vocab_size,
    num_rows,
    row_asks,
    about,
    results,
    results_stride,
    candidates,
    candidate_ids,
    logprobs,
    logprob_ids,
    logprobs_stride,
    ids_stride,
    BLOCK: tl.constexpr,
):
    """Any grid of one dimension, as long as the candidates."""
    values = candidates + tl.program_id(0).to(tl.int64) * vocab_size
    ids = candidate_ids + tl.program_id(0).to(tl.int64) * vocab_size
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        if (tl.load(row_asks + row) & REPORTS) != 0:
            request = tl.load(about[0] + row)
            position = row - tl.load(about[2] + request)
            result = results + request * results_stride
            first = tl.load(result)
            if (first != DEAD) & (position < tl.where(first < 0, -1 - first, first + 1)):
                source = logits + row * row_stride.to(tl.int64)
                num_top = tl.load(about[6] + tl.load(about[1] + request).to(tl.int64) * ASKED + 8)
                token = tl.load(result + 1 + position)
                report_row(
                    source,
                    row,
                    about,
                    vocab_size,
                    token,
                    num_top,
                    values,
                    ids,
                    logprobs + row * logprobs_stride,
                    logprob_ids + row * ids_stride,
                    BLOCK,
                )


@triton.jit
def report_row(source, row, about, vocab_size, token, num_top, values, ids, row_logprobs, row_ids, BLOCK: tl.constexpr):
    """Writes one row. The likeliest tokens are found one after the other, among the candidates."""
    z_max = find_max(source, row, NOTHING, about, vocab_size, 1, 1, BLOCK)
    lowest = ordered(z_max * 0.0 - float("inf"))
    floor = ordered(z_max - REACH)
    size = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    for attempt in range(2):
        if (attempt == 0) | (size < num_top):
            floor = tl.where(attempt == 0, floor, lowest)
            size, _, mass = gather(source, row, NOTHING, 1.0, about, vocab_size, values, ids, z_max, lowest, floor, 1, 1, BLOCK)
    log_total = z_max + tl.log(mass.to(tl.float32))
    tl.store(row_logprobs, tl.load(source + token) - log_total)

    last_value = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for rank in range(num_top):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.full([BLOCK], NOBODY, tl.int32)
        for begin in range(0, size, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            z = tl.load(values + index, index < size, float("-inf"))
            candidate = tl.load(ids + index, index < size, NOBODY)
            follows = (index < size) & ((z < last_value) | ((z == last_value) & (candidate > last_id)))
            takes = follows & ((z > best) | (best_id == NOBODY))
            best = tl.where(takes, z, best)
            best_id = tl.where(takes, candidate, best_id)
        last_value = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last_value, best_id, NOBODY), 0)
        tl.store(row_logprobs + 1 + rank, last_value - log_total)
        tl.store(row_ids + rank, last_id)
