"""The fused products of a single row against the kernels that they stand for, and float64."""

import pytest
import torch

from specwire.engine.kernels.fused_row import normed_row_linear
from specwire.engine.kernels.layer_ops_torch import add_rms_norm, silu_mul
from specwire.engine.kernels.options import Start
from specwire.engine.kernels.row_linear import row_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
START = Start(has_instructions=True, is_early=True)


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("in_features", "out_features"), [(512, 24), (100, 62), (2048, 300)])
@pytest.mark.parametrize("kind", ["plain", "bias", "gates"])
def test_norm_and_product(monkeypatch, early_start, in_features, out_features, kind):
    """More blocks of features than programs, too."""
    monkeypatch.setattr("specwire.engine.kernels.fused_row._PROGRAMS", 3 if in_features < 2048 else 40)
    residual, norm, weight = (
        random(1, in_features, seed=1) * 3,
        random(in_features, seed=2),
        random(out_features, in_features, seed=3) / in_features**0.5,
    )
    bias = random(out_features, seed=4) if kind == "bias" else None
    expected = add_rms_norm(None, residual.double(), norm.double(), 1e-5) @ weight.double().t() + (0 if bias is None else bias.double())
    if kind == "gates":
        expected = silu_mul(expected)
    kept = residual.clone()
    output = normed_row_linear(residual, norm, 1e-5, weight, bias, start=START, gates=kind == "gates")
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(residual, kept)


def test_rounds_where_the_separate_kernels_round():
    """In half precision, which the interpreter rounds as a GPU does: the same numbers but for sums that fall the other way."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    residual, norm, weight = (random(*shape, seed=len(shape)).to(dtype) for shape in ((1, 64), (64,), (96, 64)))
    fused = normed_row_linear(residual, norm, 1e-5, weight, start=Start(), gates=True)
    separate = silu_mul(row_linear(add_rms_norm(None, residual, norm, 1e-5), weight, start=Start()))
    torch.testing.assert_close(fused, separate, atol=0, rtol=2 ** (-8 if dtype is torch.float16 else -6))


def test_a_product_in_a_wider_dtype():
    """As the vocabulary's: nothing is rounded."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    x, weight = random(1, 64, seed=1).to(dtype), random(40, 64, seed=2).to(dtype)
    logits = torch.full((1, 40), float("nan"), device=DEVICE)
    assert row_linear(x, weight, start=Start(), output=logits) is logits
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), atol=1e-5, rtol=1e-5)


def test_the_product_is_rounded_before_it_is_added():
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    x, weight, residual = (random(*shape, seed=shape[0]).to(dtype) for shape in ((1, 64), (40, 64), (1, 40)))
    expected = residual + row_linear(x, weight, start=Start())
    added = row_linear(x, weight, start=Start(), residual=residual)
    assert added.data_ptr() == residual.data_ptr()
    assert torch.equal(residual, expected)
