"""Exponentials and gates of 16 numbers: near float64, and what is no number stays none."""

import math

import pytest
import torch

from specwire.engine.kernels.packed_linear import DigitLinear

pytestmark = [
    pytest.mark.skipif(not DigitLinear.is_fast(), reason="this CPU has no 512-bit integer dot products"),
    pytest.mark.timeout(600),  # the first test compiles, 15 s of CPU time
]


@pytest.fixture(scope="module")
def elements():
    import numba  # here: brings a compiler

    from specwire.engine.cpu.elements import exp_below, gate_16

    @numba.njit
    def exps(values, count, largest):
        for first in range(0, count, 16):
            exp_below(values + 4 * first, largest)

    @numba.njit
    def gates(gate, up, out, count):
        for first in range(0, count, 16):
            gate_16(gate + 4 * first, up + 4 * first, out + 4 * first)

    return exps, gates


def test_exponentials(elements):
    import numpy as np

    values = torch.cat((torch.linspace(-86.0, 0.0, 1000), torch.tensor([-0.0, -1e-30, -86.9, -1e5, -math.inf, math.nan, 0.0, -1.0])))
    expected, result = values.double().exp(), values + 3.0
    elements[0](result.data_ptr(), len(result), np.float32(3.0))
    exact, shifted = expected > 2e-38, values + 3.0 - 3.0
    error = (result.double() / shifted.double().exp() - 1).abs()
    assert (error[exact] <= 2e-7 + 1e-7 * values[exact].abs()).all(), f"relative error {error[exact].max()}"
    assert (result[~exact & ~values.isnan()] < 2e-38).all()
    assert result[values.isnan()].isnan().all()


def test_gates(elements):
    generator = torch.Generator().manual_seed(1)
    gate, up = torch.randn(1024, generator=generator) * 20, torch.randn(1024, generator=generator)
    gate[:6] = torch.tensor([0.0, -200.0, 200.0, math.nan, math.inf, 1e-20])
    out = torch.empty(1024)
    elements[1](gate.data_ptr(), up.data_ptr(), out.data_ptr(), 1024)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    finite = gate.isfinite()
    error = (out - expected)[finite].abs()
    assert (error <= expected[finite].abs() * (1e-6 + 1e-7 * gate[finite].abs()) + 1e-30).all()
    assert out[3].isnan()
    assert out[4] == math.copysign(math.inf, up[4])
