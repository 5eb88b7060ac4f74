"""Drawing a draft from a row of logits with the target's noise, as `specwire.engine.sampling.draft` does.

The token of the greatest z + T * g is the one of the least E / e^(z / T), E = e^-g being exponential: of a token whose noise word alone says that
its E is too great, no logarithm is taken.
"""

import math

import numpy as np
from numba import carray, njit

from specwire.engine.cpu.elements import exp_below
from specwire.engine.cpu.intrinsics import bits_of_f32, f32_of_bits, i64_at
from specwire.engine.cpu.kernels import ABSOLUTE, OPTIONS, f32

LANES = 16
CHOICE_SCRATCH = 16 + 2 * 4 * LANES
"""Floats of scratch beside those of a row."""
_MASK = 0xFFFFFFFF
_UNIT = 2.0**-32
_MAX_UNIFORM = np.float32(1.0 - 2.0**-24)
_SLACK = 1.001
"""Of the comparison without logarithms, for rounding."""


@njit(**OPTIONS)
def philox_16(blocks, index, choice, key, out):
    """Words of stream 0 of 16 blocks (address of int64) into out, address of int64 [4, 16]: Philox4x32-10 of (block, index, choice, 0)."""
    numbers, words = carray(i64_at(blocks), (LANES,)), carray(i64_at(out), (4, LANES))
    for lane in range(LANES):
        a, b, c, d = numbers[lane] & _MASK, index & _MASK, choice & _MASK, 0
        k0, k1 = key & _MASK, (key >> 32) & _MASK
        for _ in range(10):
            p, q = (a & _MASK) * 0xD2511F53, (c & _MASK) * 0xCD9E8D57
            a, b, c, d = ((q >> 32) & _MASK) ^ b ^ k0, q & _MASK, ((p >> 32) & _MASK) ^ d ^ k1, p & _MASK
            k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
        words[0, lane], words[1, lane], words[2, lane], words[3, lane] = a, b, c, d


@njit(**OPTIONS)
def largest(values, count):
    """Of float32 values; NaN if there is one that is positive. As integers, whose order is that of the numbers: those become vectors."""
    x = f32(values, count)
    best = np.int32(-(2**31))
    for i in range(count):
        bits = bits_of_f32(x[i])
        best = max(best, bits ^ ((bits >> np.int32(31)) & ABSOLUTE))
    return f32_of_bits(best ^ ((best >> np.int32(31)) & ABSOLUTE))


@njit(**OPTIONS)
def powers(logits, count, best, factor, out):
    """e^((logit - best) * factor) into out, whole groups of 16; returns the sum of count of them."""
    groups = (count + LANES - 1) // LANES
    x, y = f32(logits, LANES * groups), f32(out, LANES * groups)
    for i in range(LANES * groups):
        y[i] = (x[i] - best) * factor
    total = np.float32(0.0)
    for group in range(groups):
        exp_below(out + 4 * LANES * group, np.float32(0.0))
    for i in range(count):
        total += y[i]
    return total


@njit(**OPTIONS)
def draw(logits, num_ids, ids, temperature, index, choice, key, num_groups, blocks, starts, columns, scratch):
    """Draws from a row of logits, float32 [num_ids], padded to 16.

    Args:
        ids: address of int64 [num_ids], the target's id of each.
        temperature: 0 takes the most likely.
        num_groups, blocks, starts, columns: see `DraftWord`.
        scratch: address of float32 [num_ids padded to 16 + CHOICE_SCRATCH].

    Returns:
        The target's id and its probability; 0 if there is none.
    """
    target_ids, z = carray(i64_at(ids), (num_ids,)), f32(logits, num_ids)
    words, power = scratch, scratch + 4 * CHOICE_SCRATCH
    best = largest(logits, num_ids)
    factor = np.float32(1.0) / temperature if temperature > 0 else np.float32(1.0)
    total = powers(logits, num_ids, best, factor, power)
    token = target_ids[0]
    if not (best > -np.inf and best < np.inf and total > 0):  # no numbers
        return token, np.float32(0.0)
    chosen = -1
    for column in range(num_ids):
        if z[column] == best and (chosen < 0 or target_ids[column] < token):
            chosen, token = column, target_ids[column]
    e = f32(power, num_ids)
    if temperature > 0:
        score, limit = np.float32(-np.inf), np.inf
        first = carray(i64_at(starts), (num_groups + 1,))
        w = carray(i64_at(words), (4 * LANES,))
        places = carray(i64_at(columns), (num_ids, 2))
        for group in range(num_groups):
            philox_16(blocks + 8 * LANES * group, index, choice, key, words)
            for number in range(first[group], first[group + 1]):
                column = places[number, 0]
                uniform = (w[places[number, 1]] + 0.5) * _UNIT
                if uniform <= limit * e[column]:
                    wait = -math.log1p(-np.float64(min(np.float32(uniform), _MAX_UNIFORM)))
                    own = np.float32(temperature * np.float32(-math.log(wait))) + z[column]
                    if own > score or (own == score and target_ids[column] < token):
                        score, chosen, token = own, column, target_ids[column]
                        limit = _SLACK * wait / e[column]
    return token, e[chosen] / total
