"""Counter-based noise: every random number is a pure function of (key, index, choice, stream) (design section 3).

Philox4x32-10 is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
MAX_UNIFORM = 1.0 - 2.0**-24
"""The largest float32 below 1."""

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
"""Largest value that `gumbel` can return (word 0): 22.87."""
GUMBEL_MIN = -math.log(-math.log1p(-MAX_UNIFORM))
"""Smallest value that `gumbel` can return (word 2^32 - 1): -2.81."""


class Stream(IntEnum):
    """What a noise word is for; the last counter word."""

    TARGET = 0  # also drafting with shared noise
    DRAFT = 1  # private drafting
    ACCEPT = 2
    RESIDUAL = 3
    SYNTHETIC = 4


def key_to_int64(key: int) -> int:
    """An unsigned 64-bit key as the signed integer with the same bits, which an int64 tensor can hold."""
    assert 0 <= key < 2**64, f"key {key} is not an unsigned 64-bit integer"
    return key - 2**64 if key >= 2**63 else key


def noise_words(keys: Tensor, indices: Tensor, choices: Tensor, stream: Stream, vocab_size: int) -> Tensor:
    """The words of every token of the vocabulary.

    Args:
        keys, indices, choices: [R] int64; keys in two's complement (`key_to_int64`).

    Returns:
        [R, vocab_size] int64 in [0, 2^32).
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=keys.device).unsqueeze(0)  # [1, ceil(V / 4)]
    return _philox(keys, indices, choices, stream, blocks).flatten(1)[:, :vocab_size]


def noise_words_at(keys: Tensor, indices: Tensor, choices: Tensor, stream: Stream, token_ids: Tensor) -> Tensor:
    """The words of some tokens of each row: `noise_words(...).gather(1, token_ids)` without the rest.

    Args:
        keys, indices, choices: [R] int64.
        token_ids: [R, m] int64.

    Returns:
        [R, m] int64 in [0, 2^32).
    """
    words = _philox(keys, indices, choices, stream, token_ids >> 2)  # [R, m, 4]
    return words.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, finite: between GUMBEL_MIN and GUMBEL_MAX.

    The uniform is rounded to float32 once and then kept below 1: one that rounds to 1 would make its token win whatever
    the logits. Large noise comes from small words, where float32 is dense.
    """
    x = words.to(torch.float64).add_(0.5).mul_(2.0**-32).to(torch.float32).clamp_(max=MAX_UNIFORM)
    return x.neg_().log1p_().neg_().log_().neg_()


def uniforms(keys: Tensor, indices: Tensor, choices: Tensor, stream: Stream) -> Tensor:
    """One uniform in the open interval (0, 1) for each row: the first word of counter (0, index, choice, stream).

    Returns:
        [R] float64, so that `u < c` is always true for c = 1 and never for c = 0.
    """
    words = noise_words(keys, indices, choices, stream, vocab_size=1).squeeze(1)  # [R]
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _philox(keys: Tensor, indices: Tensor, choices: Tensor, stream: Stream, blocks: Tensor) -> Tensor:
    """Philox4x32-10 of counters (block, index, choice, stream).

    The 64-bit product of two words wraps in int64, but its bits are right; masking turns its halves into words again.
    A low half needs no mask before the xor that it goes into, since the sum of both is masked.

    Args:
        blocks: [1 or R, m] int64.

    Returns:
        [R, m, 4] int64 in [0, 2^32).
    """
    device = keys.device
    steps = _column(_KEY_STEPS, device)
    key_words = torch.stack([keys, keys >> 32])  # [2, R], upper halves masked below
    rounds = torch.arange(_NUM_ROUNDS, device=device).view(-1, 1, 1)
    round_keys = ((key_words + rounds * steps) & _MASK).unsqueeze(-1)  # [10, 2, R, 1]
    multipliers = _column(_MULTIPLIERS, device).unsqueeze(1)

    shape = (len(keys), blocks.shape[1])
    state = torch.stack([blocks.expand(shape), choices.unsqueeze(1).expand(shape)])  # [2, R, m]: counter words 0 and 2
    word0, word2 = state.unbind(0)  # views
    word1, word3 = indices.unsqueeze(1), torch.full_like(indices, int(stream)).unsqueeze(1)  # [R, 1], later [R, m]
    products, spare = torch.empty_like(state), torch.empty_like(state)
    for round_key in round_keys.unbind(0):
        product0, product2 = torch.mul(state, multipliers, out=products).unbind(0)
        torch.bitwise_right_shift(product2, 32, out=word0).bitwise_xor_(word1)
        torch.bitwise_right_shift(product0, 32, out=word2).bitwise_xor_(word3)
        state.bitwise_xor_(round_key).bitwise_and_(_MASK)
        word1, word3 = product2, product0
        products, spare = spare, products
    return torch.stack([word0, word1 & _MASK, word2, word3 & _MASK], dim=-1)


def _column(words: tuple[int, int], device: torch.device) -> Tensor:
    """[2, 1] int64, filled on the device: a copy from the host would make it wait, and no graph can hold one."""
    column = torch.empty((2, 1), dtype=torch.int64, device=device)
    for row, word in zip(column, words, strict=True):
        row.fill_(word)
    return column
