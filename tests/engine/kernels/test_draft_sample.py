"""Drafts and their probabilities in one kernel against the drafting sampler."""

import math

import pytest
import torch

from specwire.engine.kernels import draft_sample as kernel
from specwire.engine.kernels import draft_sample_torch as twin
from specwire.engine.sampling.draft import sample_draft
from specwire.engine.sampling.philox import key_to_int64

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = [0.0, 1.0, 0.3, 2.5, 0.01]
BACKENDS = pytest.mark.parametrize("module", [kernel, twin], ids=["triton", "torch"])


def sample(module, logits, temperatures, index_dtype=torch.int32):
    count = len(temperatures)
    keys = [(2**64 - 1) // (1 + 3 * row) for row in range(count)]
    indices, choices = [1000 * row + 12 for row in range(count)], [row % 3 for row in range(count)]
    token_ids, probs = module.draft_sample(
        logits,
        torch.tensor(temperatures, dtype=torch.float32, device=DEVICE),
        torch.tensor([key_to_int64(key) for key in keys], device=DEVICE),
        torch.tensor(indices, dtype=index_dtype, device=DEVICE),
        torch.tensor(choices, dtype=index_dtype, device=DEVICE),
    )
    return token_ids, probs, sample_draft(logits, temperatures=temperatures, keys=keys, indices=indices, choices=choices)


@BACKENDS
@pytest.mark.parametrize("vocab_size", [7, 2059])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_is_the_drafting_samplers_token_and_probability(module, vocab_size, index_dtype):
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(DEVICE) * 3
    logits[:, 2] = -torch.inf
    token_ids, probs, expected = sample(module, logits, TEMPERATURES, index_dtype)
    assert torch.equal(token_ids, expected.token_ids)
    torch.testing.assert_close(probs, expected.probs, atol=1e-6, rtol=1e-5)


@BACKENDS
def test_large_logits_lose_nothing(module):
    """Logits far from 0, an unlikely draft, and one that is all but certain."""
    logits = torch.full((3, 5000), 900.0, device=DEVICE)
    logits[1] -= 2000.0
    logits[2, 4100] = 930.0
    token_ids, probs, expected = sample(module, logits, [1.0, 0.7, 1.0])
    assert torch.equal(token_ids, expected.token_ids)
    assert probs[:2].tolist() == pytest.approx([1 / 5000] * 2, rel=1e-4)
    assert (int(token_ids[2]), float(probs[2])) == (4100, pytest.approx(1.0, abs=1e-6))


@BACKENDS
def test_ties_bad_rows_and_forbidden_tokens(module):
    logits = torch.zeros(6, 5000, device=DEVICE)
    logits[0, [4800, 4500, 4999]] = 2.0  # a tie: the lowest id
    logits[1, 4097] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 4321] = -50.0  # the only token allowed
    logits[5, :4999] = -torch.inf  # all but the last one, alone in its chunk
    token_ids, probs, _ = sample(module, logits, [0.0, 0.0, 1.0, 1.0, 1.0, 0.5])
    assert token_ids.tolist() == [4500, 0, 0, 0, 4321, 4999]
    expected = math.exp(2) / (4997 + 3 * math.exp(2))
    assert probs.tolist() == pytest.approx([expected, 0.0, 0.0, 0.0, 1.0, 1.0], rel=1e-5)
