"""Products of a few rows against float64, with poisoned outputs and partial sums."""

import math

import pytest
import torch

from specwire.engine.kernels.options import Product, ProductTuning, padded_rows
from specwire.engine.kernels.skinny_linear import ProductScratch, skinny_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"), [(1, 256, 64), (5, 200, 100), (16, 64, 30), (33, 320, 64), (64, 130, 16), (100, 64, 48)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_the_product(poisoned_memory, early_start, splits, num_rows, in_features, out_features, has_bias):
    x, weight, bias = random(num_rows, in_features, seed=1), random(out_features, in_features, seed=2), random(out_features, seed=3)
    tuning = ProductTuning(features=32, depth=32, splits=splits, num_stages=2, prefetch_depth=64)
    scratch = ProductScratch([Product(padded_rows(num_rows), out_features, in_features, tuning)], DEVICE)
    scratch.partial.fill_(float("nan"))
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    for _ in range(2):
        output = skinny_linear(x, weight, bias if has_bias else None, tuning, scratch, early=True)
        torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-5)
        assert not scratch.arrived.any()
    if DEVICE == "cpu":
        # The first 64 input features of each split, twice.
        span = math.ceil(math.ceil(in_features / 32) / splits) * 32
        ends = [min(begin + 64, begin + span, in_features) for begin in range(0, in_features, span)]
        expected_bytes = sum(end - begin for begin, end in zip(range(0, in_features, span), ends, strict=True)) * 4 * out_features * 2
        assert sum(num_bytes for _, num_bytes in early_start.prefetched) == (expected_bytes if in_features % 4 == 0 else 0)


def test_a_row_does_not_depend_on_the_others():
    tuning = ProductTuning(features=32, depth=32, splits=2, num_stages=2)
    scratch = ProductScratch([Product(16, 64, 128, tuning)], DEVICE)
    x, weight = random(16, 128, seed=1), random(64, 128, seed=2)
    together = skinny_linear(x, weight, None, tuning, scratch)
    few = skinny_linear(x[3:8].contiguous(), weight, None, tuning, scratch)
    assert torch.equal(few, together[3:8])


def test_padded_rows():
    assert [padded_rows(count) for count in (1, 2, 16, 17, 32, 33, 64, 65)] == [16, 16, 16, 32, 32, 64, 64, 128]
