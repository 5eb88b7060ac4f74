"""Sampling of rows of logits, in Triton: the argmax with noise over each row's support.

The torch twins, also of `filters` and `logprobs`, are in `row_ops_torch`. Rows that ask for nothing pay a comparison.
"""

import torch
import triton
import triton.language as tl

from specwire.engine.graphs import asks as flags
from specwire.engine.graphs.filters import find_cuts as find_cuts
from specwire.engine.graphs.logprobs import report_logprobs as report_logprobs
from specwire.engine.graphs.processing import load_z, read_by_process
from specwire.engine.graphs.tensors import RoundInputs, SlotState
from specwire.engine.kernels.gumbel_argmax import CHUNK, chunk_best, row_argmax
from specwire.engine.sampling.philox import MAX_UNIFORM, Stream

FILTERS = tl.constexpr(flags.FILTERS)


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
