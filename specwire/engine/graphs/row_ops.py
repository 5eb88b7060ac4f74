"""Sampling of rows of logits, in Triton: the argmax with noise over each row's support, and log-probabilities of what was emitted.

The torch twins are in `row_ops_torch`. Rows that ask for nothing pay a comparison.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs import tensors
from specwire.engine.graphs.filters import find_cuts as find_cuts
from specwire.engine.graphs.processing import load_z, read_by_process
from specwire.engine.graphs.tensors import RoundInputs, SlotState
from specwire.engine.kernels.gumbel_argmax import CHUNK, chunk_best, row_argmax
from specwire.engine.sampling.philox import MAX_UNIFORM, Stream

FILTERS, REPORTS, ASKED, DEAD = (tl.constexpr(number) for number in (flags.FILTERS, flags.REPORTS, flags.ASKED, tensors.DEAD))
_BLOCK = 4096
"""Tokens that a program looks at at once."""


def sample_targets(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> torch.Tensor:
    """See `row_ops_torch.sample_targets`."""
    num_rows, vocab_size = logits.shape
    chunk = min(CHUNK, max(16, triton.next_power_of_2(vocab_size)))
    num_chunks = triton.cdiv(vocab_size, chunk)
    best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    target_chunks[(num_chunks, num_rows)](
        logits, logits.stride(0), vocab_size, inputs.asks, inputs.temperatures, inputs.keys, inputs.indices, inputs.choices,
        read_by_process(state, inputs),
        inputs.cut_values, inputs.cut_ids, best, best_token,
        SEEN=state.seen_bit, STOP=state.stop_bit, MAX_UNIFORM=MAX_UNIFORM, APPROXIMATE=logits.is_cuda, STREAM=int(Stream.TARGET), CHUNK=chunk,
        num_warps=8,
    )  # fmt: skip
    row_argmax[(num_rows,)](best, best_token, token_ids, num_chunks, BLOCK=triton.next_power_of_2(num_chunks), num_warps=1)
    return token_ids


def report_logprobs(logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> None:
    """See `row_ops_torch.report_logprobs`."""
    block = min(_BLOCK, triton.next_power_of_2(logits.shape[1]))
    report_kernel[(len(logits),)](
        logits, logits.stride(0), logits.shape[1], inputs.asks, inputs.requests, inputs.slots, inputs.logit_starts,
        inputs.results, inputs.results.stride(0), state.asked, inputs.logprobs, inputs.logprob_ids,
        inputs.logprobs.stride(0), inputs.logprob_ids.stride(0), BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


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
