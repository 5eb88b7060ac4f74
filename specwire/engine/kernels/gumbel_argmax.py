"""Parts of the kernels that sample, in Triton: argmax of z + T * g by chunks of a row, with the noise made where it is used (design section 3).

The words are those of `sampling.philox`, bit for bit; `g` is equal to rounding. No noise is ever in memory. What the parts give together is
`gumbel_argmax_torch.gumbel_argmax`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

LN_2 = tl.constexpr(0.6931471805599453)
CHUNK = 2048
"""Tokens of one program."""


@triton.jit
def log2(x, APPROXIMATE: tl.constexpr):
    """One instruction instead of about twenty, where the device has it; off by 2^-22 at most between 1/2 and 2, relatively so elsewhere."""
    if APPROXIMATE:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def gumbel_from_word(word, MAX_UNIFORM: tl.constexpr, APPROXIMATE: tl.constexpr):
    """`sampling.philox.gumbel` in float32, to 1e-6: log1p from atanh's series below 1/4, where a logarithm of 1 - x is imprecise."""
    # A conversion from uint32 to float32 rounds once; the half only shows where it is exact.
    x = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, MAX_UNIFORM)
    ratio = x / (2.0 - x)
    square = ratio * ratio
    series = 2.0 * ratio * (1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0))))
    exponential = tl.where(x < 0.25, series, log2(1.0 - x, APPROXIMATE) * -LN_2)
    return log2(exponential, APPROXIMATE) * -LN_2


@triton.jit
def best_of(value, token, other_value, other_token):
    """The larger value, of equal ones the lower token."""
    take = (value > other_value) | ((value == other_value) & (token < other_token))
    return tl.where(take, value, other_value), tl.where(take, token, other_token)


@triton.jit
def chunk_best(z, block, row, temperatures, keys, indices, choices, STREAM: tl.constexpr, MAX_UNIFORM: tl.constexpr, APPROXIMATE: tl.constexpr):
    """(value, token): the largest z + T * g of a chunk. z is [CHUNK // 4, 4]: one Philox block has the words of four tokens."""
    temperature = tl.load(temperatures + row)
    z02, z13 = tl.split(tl.reshape(z, [z.shape[0], 2, 2]))
    z0, z2 = tl.split(z02)
    z1, z3 = tl.split(z13)
    if temperature > 0.0:
        index = tl.load(indices + row).to(tl.uint32)
        choice = tl.load(choices + row).to(tl.uint32)
        word0, word1, word2, word3 = tl.philox(tl.load(keys + row), block.to(tl.uint32), index, choice, tl.full([], STREAM, tl.uint32))
        z0 += temperature * gumbel_from_word(word0, MAX_UNIFORM, APPROXIMATE)
        z1 += temperature * gumbel_from_word(word1, MAX_UNIFORM, APPROXIMATE)
        z2 += temperature * gumbel_from_word(word2, MAX_UNIFORM, APPROXIMATE)
        z3 += temperature * gumbel_from_word(word3, MAX_UNIFORM, APPROXIMATE)
    value, token = best_of(z0, 4 * block, z1, 4 * block + 1)
    other_value, other_token = best_of(z2, 4 * block + 2, z3, 4 * block + 3)
    value, token = best_of(value, token, other_value, other_token)
    return tl.reduce((value, token), 0, best_of)


@triton.jit
def row_argmax(best, best_token, token_ids, num_chunks, BLOCK: tl.constexpr):
    """Grid (rows)."""
    chunk = tl.arange(0, BLOCK)
    offset = tl.program_id(0) * num_chunks + chunk
    value = tl.load(best + offset, chunk < num_chunks, float("-inf"))
    token = tl.load(best_token + offset, chunk < num_chunks, 2147483647)
    value, token = tl.reduce((value, token), 0, best_of)
    tl.store(token_ids + tl.program_id(0), tl.where(tl.abs(value) < float("inf"), token, -1).to(tl.int64))
