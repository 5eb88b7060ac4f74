"""The decoder against transformers: every family, one pass and ragged mixes of chunks."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from specwire.engine.models.loader import load_model
from tests.engine.tiny_models import FAMILIES, compute, make_runner, save_tiny_model

TOLERANCE = 1e-4
"""Logits here reach about 5; two float32 orders of summation differ by a few 1e-6."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny_model(folder, request.param)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def test_one_pass_equals_transformers(tiny):
    folder, reference = tiny
    runner, manager = make_runner(load_model(folder, torch.float32))
    tokens = random_tokens(150, 1)
    manager.open(0, tokens)
    logits = compute(runner, manager, {0: tokens})[0]
    expected = reference_logits(reference, tokens)
    assert logits.dtype == torch.float32
    assert expected.abs().max() > 2.0, "the comparison needs logits of some size"
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_ragged_chunks_equal_one_pass(tiny):
    """Five sequences advance by random chunks (0 to 7 tokens, or a prefill chunk) in shared passes."""
    folder, reference = tiny
    runner, manager = make_runner(load_model(folder, torch.float32))
    rng = random.Random(7)
    sequences = {seq_id: random_tokens(rng.randint(20, 120), seq_id) for seq_id in range(5)}
    collected: dict[int, list[torch.Tensor]] = {seq_id: [] for seq_id in sequences}
    for seq_id, tokens in sequences.items():
        manager.open(seq_id, tokens)
    while True:
        chunks = {}
        for seq_id, tokens in sequences.items():
            start = manager.num_computed_tokens(seq_id)
            size = rng.choice([0, 1, 1, 2, 5, 6, 7, 40, 55])
            if tokens[start : start + size]:
                chunks[seq_id] = tokens[start : start + size]
        if not chunks and all(manager.num_computed_tokens(s) == len(t) for s, t in sequences.items()):
            break
        for seq_id, logits in (compute(runner, manager, chunks) if chunks else {}).items():
            collected[seq_id].append(logits)
    for seq_id, tokens in sequences.items():
        torch.testing.assert_close(torch.cat(collected[seq_id]), reference_logits(reference, tokens), atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_near_transformers_bfloat16(tiny):
    """Both round differently; neither may be farther from float32 than rounding explains."""
    folder, reference = tiny
    tokens = random_tokens(60, 3)
    exact = reference_logits(reference, tokens)
    runner, manager = make_runner(load_model(folder, torch.bfloat16))
    manager.open(0, tokens)
    logits = compute(runner, manager, {0: tokens})[0]
    theirs = reference_logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tokens)
    ours_error, their_error = (logits - exact).abs().mean(), (theirs - exact).abs().mean()
    assert logits.dtype == torch.float32
    assert ours_error < 1.3 * their_error, f"mean error {ours_error} against transformers' {their_error}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model(folder, "llama")
    return folder


def test_prefix_cache_hit_gives_the_same_logits(llama):
    runner, manager = make_runner(load_model(llama, torch.float32))
    tokens = random_tokens(70, 11)
    manager.open(0, tokens)
    fresh = compute(runner, manager, {0: tokens})[0]
    manager.finalize(0, tokens)
    manager.close(0)
    hit = manager.open(1, tokens)
    assert hit == 64
    again = compute(runner, manager, {1: tokens[hit:]})[1]
    torch.testing.assert_close(again, fresh[hit:], atol=TOLERANCE, rtol=0)


def test_decode_after_rollback_equals_fresh(llama):
    model = load_model(llama, torch.float32)
    tokens = random_tokens(40, 12)
    runner, manager = make_runner(model)
    manager.open(0, tokens)
    compute(runner, manager, {0: tokens[:30]})
    for rejected in (1, 4, 7):
        compute(runner, manager, {0: random_tokens(rejected, 99 + rejected)})
        manager.set_computed(0, 30)
    rolled_back = compute(runner, manager, {0: tokens[30:]})[0]
    runner, manager = make_runner(model)
    manager.open(0, tokens)
    fresh = compute(runner, manager, {0: tokens})[0]
    torch.testing.assert_close(rolled_back, fresh[30:], atol=TOLERANCE, rtol=0)


def test_numbers_gone_bad_stay_in_their_sequence(llama):
    """One sequence's KV becomes NaN; the other rows of the same pass, padded beside it, and later owners of its blocks don't notice."""
    runner, manager = make_runner(load_model(llama, torch.float32))
    tokens = {0: random_tokens(33, 20), 1: random_tokens(50, 21), 2: random_tokens(18, 22)}
    for seq_id, ids in tokens.items():
        manager.open(seq_id, ids)
    expected = compute(runner, manager, tokens)
    for layer in runner.kv_cache.layers:
        layer[manager.block_table(1)] = float("nan")
    for seq_id, ids in tokens.items():
        manager.set_computed(seq_id, len(ids) - 3)
    again = compute(runner, manager, {seq_id: ids[-3:] for seq_id, ids in tokens.items()})
    assert again[1].isnan().all()
    for seq_id in (0, 2):
        torch.testing.assert_close(again[seq_id], expected[seq_id][-3:], atol=TOLERANCE, rtol=0)
    manager.close(1, forget=True)
    manager.open(3, tokens[1])
    torch.testing.assert_close(compute(runner, manager, {3: tokens[1]})[3], expected[1], atol=TOLERANCE, rtol=0)
