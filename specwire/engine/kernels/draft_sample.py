"""A draft and its probability in one pass over the logits, in Triton: argmax with noise, and the sum of softmax beside it."""

import torch
import triton
import triton.language as tl

from specwire.engine.kernels.gumbel_argmax import CHUNK, best_of, chunk_best
from specwire.engine.sampling.philox import MAX_UNIFORM, Stream


def draft_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draft_sample_torch.draft_sample`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    partial = torch.empty((3, num_rows, num_chunks), dtype=torch.float32, device=logits.device)  # best z + T * g, largest z, sum of exp
    best_token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    chunk_sample[(num_chunks, num_rows)](
        logits, temperatures, keys, indices, choices, *partial.unbind(0), best_token, logits.stride(0), vocab_size,
        STREAM=int(Stream.TARGET), MAX_UNIFORM=MAX_UNIFORM, APPROXIMATE=logits.is_cuda, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    row_sample[(num_rows,)](
        logits, temperatures, *partial.unbind(0), best_token, token_ids, probs, logits.stride(0), num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip
    return token_ids, probs


@triton.jit
def chunk_sample(
    logits,
    temperatures,
    keys,
    indices,
    choices,
    best,
    largest,
    total,
    best_token,
    row_stride,
    vocab_size,
    STREAM: tl.constexpr,
    MAX_UNIFORM: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (chunks, rows). The sum is of exp((z - largest) / T)."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    block = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    column = 4 * block[:, None] + tl.arange(0, 4)[None, :]
    z = tl.load(logits + row.to(tl.int64) * row_stride + column, column < vocab_size, float("-inf"))
    z = tl.where(z == z, z, float("inf"))  # a bad row ends as one with infinity
    temperature = tl.load(temperatures + row)
    z_max = tl.max(tl.max(z, 1), 0)
    shift = tl.where(tl.abs(z_max) < float("inf"), z_max, 0.0)  # else there is nothing to sum, or nobody looks at the sum
    sum_exp = tl.sum(tl.sum(tl.exp((z - shift) / tl.where(temperature > 0.0, temperature, 1.0)), 1), 0)
    value, token = chunk_best(z, block, row, temperatures, keys, indices, choices, STREAM, MAX_UNIFORM, APPROXIMATE)
    offset = row * tl.num_programs(0) + chunk
    tl.store(best + offset, value)
    tl.store(best_token + offset, token)
    tl.store(largest + offset, z_max)
    tl.store(total + offset, sum_exp)


@triton.jit
def row_sample(logits, temperatures, best, largest, total, best_token, token_ids, probs, row_stride, num_chunks, BLOCK: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    offset = row * num_chunks + chunk
    value = tl.load(best + offset, inside, float("-inf"))
    token = tl.load(best_token + offset, inside, 2147483647)
    value, token = tl.reduce((value, token), 0, best_of)
    is_good = tl.abs(value) < float("inf")
    token = tl.where(is_good, token, 0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    scale = tl.where(temperature > 0.0, temperature, 1.0)
    chunk_max = tl.load(largest + offset, inside, float("-inf"))
    z_max = tl.max(chunk_max, 0)
    shift = tl.where(is_good, z_max, 0.0)
    sum_exp = tl.sum(tl.load(total + offset, inside, 0.0) * tl.exp((chunk_max - shift) / scale), 0)
    prob = tl.exp((tl.load(logits + row.to(tl.int64) * row_stride + token) - shift) / scale) / tl.where(is_good, sum_exp, 1.0)
    tl.store(token_ids + row, token)
    tl.store(probs + row, tl.where(is_good, tl.minimum(prob, 1.0), 0.0))
