"""The product of a single row against float64."""

import pytest
import torch

from specwire.engine.kernels.options import RowCut
from specwire.engine.kernels.row_linear import row_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("in_features", "out_features"), [(512, 24), (1100, 35), (16, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_the_product(in_features, out_features, has_bias):
    generator = torch.Generator().manual_seed(in_features)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((1, in_features), (out_features, in_features), (out_features,))
    )
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    output = row_linear(x, weight, bias if has_bias else None)
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("cut", [RowCut(2, 2048), RowCut(8, 512, 8)])
def test_cuts(early_start, cut):
    x, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(DEVICE) for shape in ((1, 1100), (35, 1100)))
    output = row_linear(x, weight, early=True, early_cut=cut)
    torch.testing.assert_close(output.double(), x.double() @ weight.double().t(), atol=1e-4, rtol=1e-5)
    if DEVICE == "cpu":
        assert early_start.instructions.count("wait") == -(-35 // cut.block)
