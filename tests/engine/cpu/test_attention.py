"""Attention in tiles of 16 positions: near float64 for every shape, and a query's bits are its own, whatever is computed with it."""

import math

import numpy as np
import pytest
import torch

from specwire.engine.kernels.packed_linear import DigitLinear

pytestmark = [
    pytest.mark.skipif(not DigitLinear.is_fast(), reason="this CPU has no 512-bit integer dot products"),
    pytest.mark.timeout(600),  # the first test compiles, 15 s of CPU time
]

SHAPES = {
    "one token": (1, 64, 3, 3, 64, 16),
    "the first token": (1, 0, 3, 3, 64, 16),
    "a verify step": (6, 100, 3, 3, 64, 16),
    "a prompt": (40, 0, 2, 2, 32, 16),
    "one key head": (2, 77, 1, 9, 64, 16),
    "no sharing": (12, 20, 5, 1, 16, 16),
    "half a tile to a block": (3, 40, 2, 7, 48, 8),
    "one and a half": (3, 45, 2, 8, 80, 24),
}  # rows, positions before, heads of keys, query heads of each, dim, block size


class Case:
    """Random queries over keys and values in blocks that lie anywhere, in a cache full of NaN."""

    def __init__(self, num_rows: int, context: int, num_kv_heads: int, group: int, dim: int, block_size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.num_rows, self.context, self.num_kv_heads, self.group, self.dim, self.block_size = (
            num_rows,
            context,
            num_kv_heads,
            group,
            dim,
            block_size,
        )
        num_positions = context + num_rows
        num_blocks = -(-num_positions // block_size)
        self.table = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks]
        self.queries = torch.randn(num_rows, num_kv_heads, group, dim, generator=generator)
        self.key_value = torch.randn(num_positions, 2, num_kv_heads, dim, generator=generator).bfloat16()
        self.cache = torch.full((num_blocks + 3, block_size, 2, num_kv_heads, dim), math.nan, dtype=torch.bfloat16)
        for position, row in enumerate(self.key_value):
            self.cache[self.table[position // block_size], position % block_size] = row

    def attend(self, first: int, count: int) -> torch.Tensor:
        """Rows first .. first + count - 1 in one call for each head."""
        from specwire.engine.cpu import attention  # here: brings a compiler

        out = torch.full((count, self.num_kv_heads, self.group, self.dim), math.nan)
        scratch = torch.full((attention.num_scratch_floats(count * self.group, self.context + first + count, self.dim),), math.nan)
        queries = self.queries[first : first + count].contiguous()
        for head in range(self.num_kv_heads):
            attention.attend(
                queries[0, head].data_ptr(), 4 * queries[0].numel(), self.cache.data_ptr(), self.table.data_ptr(), self.block_size,
                self.context + first, count, head, self.num_kv_heads, self.group, self.dim, np.float32(self.dim**-0.5), scratch.data_ptr(),
                out[0, head].data_ptr(), 4 * out[0].numel(),
            )  # fmt: skip
        return out

    def expected(self) -> torch.Tensor:
        keys, values = self.key_value.double().unbind(1)
        scores = torch.einsum("rhgd,phd->rhgp", self.queries.double(), keys) * self.dim**-0.5
        later = torch.arange(len(keys)) > (self.context + torch.arange(self.num_rows))[:, None]
        return torch.einsum("rhgp,phd->rhgd", scores.masked_fill(later[:, None, None], -math.inf).softmax(-1), values)


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_near_float64(name):
    case = Case(*SHAPES[name])
    error = (case.attend(0, case.num_rows) - case.expected()).norm() / case.expected().norm()
    assert error < 1e-6, f"relative error {error}"


def test_a_querys_bits_do_not_depend_on_the_rows_beside_it():
    case = Case(9, 100, 2, 3, 64, 16)
    alone = torch.cat([case.attend(row, 1) for row in range(9)])
    for count in (2, 3, 4, 9):
        for first in range(10 - count):
            assert torch.equal(case.attend(first, count), alone[first : first + count]), f"{count} rows from {first}"


def test_later_tokens_that_went_bad_do_not_reach_earlier_ones():
    case = Case(4, 30, 2, 3, 64, 16)
    good = case.attend(0, 4)
    case.cache[case.table[33 // 16], 33 % 16] = math.nan
    bad = case.attend(0, 4)
    assert torch.equal(bad[:3], good[:3])
    assert not bad[3].isfinite().any()
