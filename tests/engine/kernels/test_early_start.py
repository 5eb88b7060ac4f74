"""Kernels that start early compute what they compute otherwise: they announce and wait."""

import os
import subprocess
import sys

import pytest
import torch

from specwire.engine.kernels import layer_ops
from specwire.engine.kernels.options import KernelOptions, Product, ProductTuning
from specwire.engine.kernels.paged_attention import paged_attention
from specwire.engine.kernels.row_linear import row_linear
from specwire.engine.kernels.work_list import AttentionScratch, DeviceAttentionPlan
from specwire.engine.models.config import RopeConfig
from specwire.engine.models.rope import rope_table
from tests.engine.kernels.test_paged_attention import BATCHES, DEVICE, TUNING, random_batch


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check_instructions(called, num_programs):
    """Of one kernel in the interpreter: every program announces before it waits."""
    if DEVICE == "cpu":
        assert called.instructions == ["announce", "wait"] * num_programs
        called.instructions.clear()


def test_kernels_between_products(early_start):
    x, residual, weight = random(3, 100), random(3, 100, seed=1), random(100, seed=2)
    kept = residual.clone()
    plain = layer_ops.add_rms_norm(x, kept, weight, 1e-5)
    assert torch.equal(layer_ops.add_rms_norm(x, residual, weight, 1e-5, early=True), plain)
    assert torch.equal(residual, kept)
    check_instructions(early_start, 3)

    gate_up = random(2, 3000)
    assert torch.equal(layer_ops.silu_mul(gate_up, early=True), layer_ops.silu_mul(gate_up))
    check_instructions(early_start, 2 * 2)

    cos, sin = (table.to(DEVICE) for table in rope_table(RopeConfig(), 16, 40))
    positions, slots = torch.tensor([0, 39], device=DEVICE), torch.tensor([3, 40], device=DEVICE)
    outputs, caches = [], []
    for early in (False, True):
        cache = torch.zeros(4, 16, 2, 2, 16, device=DEVICE)
        outputs.append(layer_ops.rotary_kv_write(random(2, 8, 16), cos, sin, positions, slots, cache, early=early).clone())
        caches.append(cache)
    assert torch.equal(*outputs)
    assert torch.equal(*caches)
    check_instructions(early_start, 2)


def test_the_product_of_a_row(early_start):
    x, weight = random(1, 1100), random(35, 1100, seed=1)
    torch.testing.assert_close(row_linear(x, weight, early=True), row_linear(x, weight), atol=1e-4, rtol=1e-5)
    check_instructions(early_start, 9)


@pytest.mark.parametrize("name", ["decode rows", "padding", "verify rows of every length"])
def test_attention(early_start, name):
    """Programs without an item wait, too: kernels behind rely on it."""
    segments = BATCHES[name]
    query, *rest = random_batch(segments, 6, 2, 16, torch.float32, seed=3)
    plan = DeviceAttentionPlan(AttentionScratch(2, 16, DEVICE, TUNING), len(segments), 64, 32, 6)
    plan.update(*rest[1:3])
    outputs = [torch.full_like(query, float("nan")) for _ in range(2)]
    for early, output in enumerate(outputs):
        paged_attention(query, rest[0], rest[3], 0.25, plan, output, early=bool(early))
    torch.testing.assert_close(*outputs, atol=0, rtol=0, equal_nan=True)
    check_instructions(early_start, 2 * plan.max_items)


def test_compiled_kernels_wait_before_they_write():
    """Compiled for Hopper, without a GPU: they announce first, and before the wait only load or prefetch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.engine.kernels.hopper"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    before = {name: effects for name, *effects in map(str.split, done.stdout.splitlines())}
    assert len(before) == 7
    for name, (first, *others) in before.items():
        assert first == "griddepcontrol.launch_dependents", name
        assert set(others) <= {"ld.global", "cp.async.bulk.prefetch"}, (name, others)
    assert "ld.global" in before["add_rms_norm_kernel"]  # the norm's weight
    assert "ld.global" in before["row_linear_kernel"]
    assert "ld.global" in before["row_stream_kernel"]
    assert "cp.async.bulk.prefetch" in before["skinny_linear_kernel"]
    assert before["silu_mul_kernel"] == ["griddepcontrol.launch_dependents"]  # all that it reads was just written


def test_what_starts_early():
    """Passes whose products announce: of a single row, or of a number of rows with products of our own."""
    product = Product(16, 64, 64, ProductTuning())
    cases = [
        # options, tokens, early
        (KernelOptions(), 1, False),
        (KernelOptions(products=(product,)), 2, False),
        (KernelOptions(starts_early=True), 1, True),
        (KernelOptions(starts_early=True), 2, False),
        (KernelOptions(starts_early=True, products=(product,)), 2, True),
        (KernelOptions(starts_early=True, products=(product,)), 16, True),
        (KernelOptions(starts_early=True, products=(product,)), 17, False),
    ]
    for options, num_tokens, is_early in cases:
        assert options.is_early(num_tokens) is is_early, (options, num_tokens)
    assert KernelOptions.for_device(torch.device("cpu")) == KernelOptions()
