"""The kernels between a layer's matrix products against their torch twins and float64, with poisoned outputs."""

import pytest
import torch

from specwire.engine.kernels import layer_ops, layer_ops_torch
from specwire.engine.models.config import RopeConfig
from specwire.engine.models.rope import rope_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = pytest.mark.parametrize("ops", [layer_ops, layer_ops_torch], ids=["triton", "torch"])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@BACKENDS
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("adds", [True, False])
def test_add_rms_norm(ops, width, adds):
    x, residual, weight = random(3, width), random(3, width, seed=1) * 5, random(width, seed=2)
    total = residual.double() + (x.double() if adds else 0)
    normed = ops.add_rms_norm(x if adds else None, residual, weight, 1e-5)
    torch.testing.assert_close(residual.double(), total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normed.double(), total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), atol=1e-5, rtol=1e-5)


def test_the_sum_is_rounded_before_it_is_normed():
    """As the twin does: the residual that later layers see is the one that was normed."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter rounds bfloat16 in its own way
    x, residual, weight = (random(*shape, seed=len(shape)).to(dtype) for shape in ((2, 64), (2, 64), (64,)))
    pairs = [(ops.add_rms_norm(x, kept := residual.clone(), weight, 1e-5), kept) for ops in (layer_ops, layer_ops_torch)]
    assert torch.equal(pairs[0][1], pairs[1][1])
    torch.testing.assert_close(pairs[0][0], pairs[1][0], atol=0, rtol=2 ** (-9 if dtype is torch.float16 else -7))


@BACKENDS
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3)], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_rotary_kv_write(ops, num_heads, num_kv_heads, norm):
    head_dim, num_tokens = 16, 5
    cos, sin = (table.to(DEVICE) for table in rope_table(RopeConfig(), head_dim, 40))
    positions = torch.tensor([0, 39, 7, 7, 20], device=DEVICE)
    slots = torch.tensor([3, 40, 17, 16, 55], device=DEVICE)
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    cache = torch.full((4, 16, 2, num_kv_heads, head_dim), float("nan"), device=DEVICE)
    q_norm, k_norm = (random(head_dim, seed=1), random(head_dim, seed=2)) if norm else (None, None)

    exact = qkv.double()
    query, key = exact[:, :num_heads], exact[:, num_heads : num_heads + num_kv_heads]
    if norm:
        query, key = (
            part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() for part, weight in ((query, q_norm), (key, k_norm))
        )
    query, key = (part * cos[positions].double()[:, None] + part.roll(head_dim // 2, -1) * sin[positions].double()[:, None] for part in (query, key))
    value = exact[:, num_heads + num_kv_heads :]

    returned = ops.rotary_kv_write(qkv, cos, sin, positions, slots, cache, q_norm, k_norm, 1e-6)
    assert returned.data_ptr() == qkv.data_ptr()
    torch.testing.assert_close(returned.double(), query, atol=1e-5, rtol=1e-5)
    flat = cache.flatten(0, 1)
    torch.testing.assert_close(flat[slots, 0].double(), key, atol=1e-5, rtol=1e-5)
    assert torch.equal(flat[slots, 1].double(), value)
    untouched = torch.ones(64, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    assert flat[untouched].isnan().all()


@BACKENDS
@pytest.mark.parametrize("width", [48, 1500])
def test_silu_mul(ops, width):
    gate_up = random(3, 2 * width) * 20
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(ops.silu_mul(gate_up).double(), gate * gate.sigmoid() * up, atol=1e-5, rtol=1e-5)
