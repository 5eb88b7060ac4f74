"""Streamed products of one and two rows against the kernels that they stand for, and float64."""

import pytest
import torch

from specwire.engine.kernels.layer_ops_torch import add_rms_norm, silu_mul
from specwire.engine.kernels.options import KernelOptions, RowTuning
from specwire.engine.kernels.row_linear import row_linear
from specwire.engine.kernels.row_stream import row_stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter rounds float16 as a GPU does
TUNING = RowTuning(numbers=1024, num_programs=3)


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(("in_features", "out_features"), [(512, 24), (100, 62), (2048, 9)])
@pytest.mark.parametrize("kind", ["plain", "bias", "gates", "normed", "normed gates"])
def test_equals_the_product(early_start, num_rows, in_features, out_features, kind):
    """More blocks of features than programs, and fewer."""
    out_features *= 2 if "gates" in kind else 1
    x, weight = random(num_rows, in_features, seed=1) * 3, random(out_features, in_features, seed=3) / in_features**0.5
    norm = random(in_features, seed=2) if "normed" in kind else None
    bias = random(out_features, seed=4) if kind == "bias" else None
    expected = x.double() if norm is None else add_rms_norm(None, x.double(), norm.double(), 1e-5)
    expected = expected @ weight.double().t() + (0 if bias is None else bias.double())
    if "gates" in kind:
        expected = silu_mul(expected)
    kept = x.clone()
    output = row_stream(x, weight, bias, tuning=TUNING, norm=norm, eps=1e-5, gates="gates" in kind, early=True)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, kept)
    if DEVICE == "cpu":
        assert early_start.instructions == ["announce", "wait"] * (len(early_start.instructions) // 2)
        assert early_start.instructions


def test_rounds_where_the_separate_kernels_round():
    """The same numbers but for sums that fall the other way."""
    x, norm, weight = (random(*shape, seed=len(shape)).to(HALF) for shape in ((2, 64), (64,), (96, 64)))
    fused = row_stream(x, weight, tuning=TUNING, norm=norm, eps=1e-5, gates=True)
    separate = silu_mul(torch.cat([row_linear(row, weight) for row in add_rms_norm(None, x.clone(), norm, 1e-5).split(1)]))
    torch.testing.assert_close(fused, separate, atol=0, rtol=2 ** (-8 if HALF is torch.float16 else -6))


def test_a_product_in_a_wider_dtype():
    """As the vocabulary's: nothing is rounded."""
    x, weight = random(2, 64, seed=1).to(HALF), random(40, 64, seed=2).to(HALF)
    logits = torch.full((2, 40), float("nan"), device=DEVICE)
    assert row_stream(x, weight, tuning=TUNING, output=logits) is logits
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), atol=1e-5, rtol=1e-5)


def test_the_product_is_rounded_before_it_is_added():
    x, weight, residual = (random(*shape, seed=shape[0]).to(HALF) for shape in ((2, 64), (40, 64), (2, 40)))
    expected = residual + row_stream(x, weight, tuning=TUNING)
    added = row_stream(x, weight, tuning=TUNING, residual=residual)
    assert added.data_ptr() == residual.data_ptr()
    assert torch.equal(residual, expected)


def test_options_fit_together():
    with pytest.raises(AssertionError, match="2 fused rows, 1 streamed"):
        KernelOptions(fused_rows=2)
    assert KernelOptions(starts_early=True, streamed_rows=2, fused_rows=2).is_early(2)
    assert not KernelOptions(starts_early=True, streamed_rows=2).is_early(2)  # others of its products may not announce
