"""Kernels that start early compute what they compute otherwise: they announce, wait, and prefetch only what they may."""

import os
import subprocess
import sys

import pytest
import torch

from specwire.engine.kernels import layer_ops
from specwire.engine.kernels.options import KernelOptions, LayerTuning, Product, ProductTuning, Start
from specwire.engine.kernels.paged_attention import paged_attention
from specwire.engine.kernels.row_linear import row_linear
from specwire.engine.kernels.weight_prefetch import Stripe
from specwire.engine.kernels.work_list import AttentionScratch, DeviceAttentionPlan
from specwire.engine.models.config import RopeConfig
from specwire.engine.models.rope import rope_table
from tests.engine.kernels.test_paged_attention import BATCHES, DEVICE, TUNING, random_batch

EARLY = Start(has_instructions=True, is_early=True)


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
    early = layer_ops.add_rms_norm(x, residual, weight, 1e-5, start=EARLY, tuning=LayerTuning(norm_numbers_per_warp=64))
    torch.testing.assert_close(early, plain, atol=1e-5, rtol=1e-6)  # on a GPU, threads sum in another order
    assert torch.equal(residual, kept)
    check_instructions(early_start, 3)

    gate_up = random(2, 3000)
    early = layer_ops.silu_mul(gate_up, start=EARLY, tuning=LayerTuning(silu_block=512, silu_warps=2))
    assert torch.equal(early, layer_ops.silu_mul(gate_up))
    check_instructions(early_start, 2 * 3)

    cos, sin = (table.to(DEVICE) for table in rope_table(RopeConfig(), 16, 40))
    positions, slots = torch.tensor([0, 39], device=DEVICE), torch.tensor([3, 40], device=DEVICE)
    outputs, caches = [], []
    for start in (Start(), EARLY):
        cache = torch.zeros(4, 16, 2, 2, 16, device=DEVICE)
        outputs.append(layer_ops.rotary_kv_write(random(2, 8, 16), cos, sin, positions, slots, cache, start=start).clone())
        caches.append(cache)
    assert torch.equal(*outputs)
    assert torch.equal(*caches)
    check_instructions(early_start, 2)


def test_a_stripe_of_the_weight_behind(early_start):
    """Programs before the kernel's own take the first bytes of each row once, and change nothing else."""
    weight = random(600, 200)
    stripe = Stripe.of(weight, 600 * 300)
    assert stripe.num_bytes == 256
    x, residual = random(3, 64), random(3, 64, seed=1)
    gate_up = random(3, 3000)
    cos, sin = (table.to(DEVICE) for table in rope_table(RopeConfig(), 16, 40))
    positions, slots = torch.tensor([0, 39], device=DEVICE), torch.tensor([3, 40], device=DEVICE)
    cache = torch.zeros(4, 16, 2, 2, 16, device=DEVICE)
    calls = [
        (3, lambda **extra: layer_ops.add_rms_norm(x, residual.clone(), residual[0], 1e-5, **extra)),
        (3 * 2, lambda **extra: layer_ops.rotary_kv_write(random(2, 20, 16), cos, sin, positions, slots, cache, **extra).clone()),
        (3 * 3, lambda **extra: layer_ops.silu_mul(gate_up, tuning=LayerTuning(silu_block=512), **extra)),
    ]
    widths = [1, 3, 3]
    for (num_programs, call), width in zip(calls, widths, strict=True):
        expected = call()
        assert torch.equal(call(start=EARLY, stripe=stripe), expected)
        if DEVICE == "cpu":
            assert sorted(early_start.prefetched) == [(weight.data_ptr() + row * 800, 256) for row in range(600)]
            early_start.prefetched.clear()
        check_instructions(early_start, num_programs + stripe.num_lines(width) * width)


def test_stripes_are_lines_of_the_cache():
    weight = random(10, 64)
    assert Stripe.of(weight, 10 * 383) == Stripe(weight, 256)  # whole rows at most
    assert Stripe.of(weight, 10 * 10**6).num_bytes == 256
    for nothing in (Stripe.of(weight, 0), Stripe.of(weight, 1279), Stripe.of(None, 10**6), Stripe.of(random(10, 63), 10**6)):
        assert nothing.num_bytes == nothing.num_lines(1) == 0


def test_the_product_of_a_row(early_start):
    x, weight = random(1, 1100), random(35, 1100, seed=1)
    torch.testing.assert_close(row_linear(x, weight, start=EARLY), row_linear(x, weight, start=Start()), atol=1e-4, rtol=1e-5)
    check_instructions(early_start, 9)


@pytest.mark.parametrize("positions", [0, 16, 64])
@pytest.mark.parametrize("name", ["decode rows", "padding", "verify rows of every length"])
def test_attention(early_start, positions, name):
    """Programs without an item wait, too: kernels behind rely on it."""
    segments = BATCHES[name]
    query, *rest = random_batch(segments, 6, 2, 16, torch.float32, seed=3)
    plan = DeviceAttentionPlan(AttentionScratch(2, 16, DEVICE, TUNING), len(segments), 64, 32, 6)
    plan.update(*rest[1:3])
    outputs = [torch.full_like(query, float("nan")) for _ in range(2)]
    paged_attention(query, rest[0], rest[3], 0.25, plan, outputs[0])
    paged_attention(query, rest[0], rest[3], 0.25, plan, outputs[1], start=EARLY, prefetched_positions=positions)
    torch.testing.assert_close(*outputs, atol=0, rtol=0, equal_nan=True)
    if DEVICE == "cpu":
        # Of each head of each item: keys and values of the first positions that it has.
        spans = [min(end - begin, positions) for *_, begin, end, _, splits in plan.items.tolist() if splits]
        assert len(early_start.prefetched) == 2 * 2 * sum(spans)
        cache = rest[0]
        vectors = {cache.data_ptr() + number * 64 for number in range(cache.numel() // 16)}
        assert {address for address, _ in early_start.prefetched} <= vectors
        assert {num_bytes for _, num_bytes in early_start.prefetched} <= {64}
    check_instructions(early_start, 2 * plan.max_items)


def test_compiled_kernels_wait_before_they_write():
    """Compiled for Hopper, without a GPU: they announce first, and before the wait only load or prefetch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.engine.kernels.hopper"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    before = {}
    for line in done.stdout.splitlines():
        name, *effects = line.split()
        before.setdefault(name, []).append(effects)
    assert len(before) == 7
    for name, cases in before.items():
        for first, *others in cases:
            assert first == "griddepcontrol.launch_dependents", name
            assert set(others) <= {"ld.global", "cp.async.bulk.prefetch"}, (name, others)
    assert "ld.global" in before["add_rms_norm_kernel"][1]  # the norm's weight
    assert "cp.async.bulk.prefetch" in before["add_rms_norm_kernel"][0]
    assert "ld.global" in before["row_linear_kernel"][0]
    assert "cp.async.bulk.prefetch" in before["attend"][0]
    assert before["silu_mul_kernel"][1] == ["griddepcontrol.launch_dependents"]  # all that it reads was just written


def test_what_starts_early():
    """In a chain the kernels of a pass whose products announce: of a single row, or of a number of rows with products of our own."""
    product = Product(16, 64, 64, ProductTuning())
    chain = KernelOptions(early="chain", early_from=0)
    with_product = KernelOptions(early="chain", products=(product,))
    cases = [
        # options, tokens, early
        (KernelOptions(), 1, False),
        (chain, 1, True),
        (chain, 2, False),
        (with_product, 2, True),
        (with_product, 16, True),
        (with_product, 17, False),
        (KernelOptions(early="all"), 2, True),
    ]
    for options, num_tokens, is_early in cases:
        assert options.layer_start(num_tokens) == (EARLY if is_early else Start()), (options, num_tokens)
    assert KernelOptions().row_start(2**22) == EARLY
    assert KernelOptions().row_start(2**22 - 1) == Start()
    assert KernelOptions(early="chain").row_start(1) == Start(has_instructions=True)
    assert chain.row_start(1) == EARLY
    assert KernelOptions.for_device(torch.device("cpu")).row_start(2**30) == Start()
