"""Noise, argmax and their ties in one kernel against the sampler's own noise."""

import pytest
import torch
import triton
import triton.language as tl

from specwire.engine.graphs import row_ops
from specwire.engine.graphs.tensors import RoundInputs, RoundLimits, SlotState
from specwire.engine.kernels import gumbel_argmax as kernel
from specwire.engine.kernels.gumbel_argmax_torch import gumbel_argmax
from specwire.engine.sampling.philox import MAX_UNIFORM, Stream, gumbel, key_to_int64, noise_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sample_targets(logits, temperatures, keys, indices, choices, stream):
    """The kernel of rounds, over rows that ask for nothing."""
    assert stream is Stream.TARGET
    limits = RoundLimits(max_num_seqs=len(logits), max_num_draft_tokens=0, max_num_batched_tokens=len(logits), max_model_len=16)
    inputs = RoundInputs.allocate(limits, 1, DEVICE)
    for target, source in ((inputs.temperatures, temperatures), (inputs.keys, keys), (inputs.indices, indices), (inputs.choices, choices)):
        target.copy_(source)
    return row_ops.sample_targets(logits, SlotState.allocate(limits, 16, DEVICE, logits.shape[1]), inputs)


BACKENDS = pytest.mark.parametrize("sample", [sample_targets, gumbel_argmax], ids=["triton", "torch"])


def rows(temperatures):
    """(temperatures, keys, indices, choices) with large and small keys."""
    count = len(temperatures)
    keys = [key_to_int64((2**64 - 1) // (1 + 3 * row)) for row in range(count)]
    columns = (torch.tensor(keys), torch.arange(count) * 1000 + 12, torch.arange(count) % 3)
    return torch.tensor(temperatures, dtype=torch.float32, device=DEVICE), *(column.to(DEVICE) for column in columns)


@triton.jit
def write_words(words, key, index, choice, STREAM: tl.constexpr, COUNT: tl.constexpr):
    block = tl.arange(0, COUNT)
    parts = tl.philox(tl.load(key), block.to(tl.uint32), tl.load(index).to(tl.uint32), tl.load(choice).to(tl.uint32), tl.full([], STREAM, tl.uint32))
    for part in tl.static_range(4):
        tl.store(words + 4 * block + part, parts[part].to(tl.int64))


@triton.jit
def write_noise(words, noise, MAX_UNIFORM: tl.constexpr, APPROXIMATE: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(noise + index, kernel.gumbel_from_word(tl.load(words + index).to(tl.uint32), MAX_UNIFORM, APPROXIMATE))


def test_words_are_the_samplers():
    _, keys, indices, choices = rows([1.0] * 3)
    for row in range(3):
        for stream in (Stream.TARGET, Stream.DRAFT):
            words = torch.full((256,), -1, dtype=torch.int64, device=DEVICE)
            write_words[(1,)](words, keys[row:], indices[row:], choices[row:], STREAM=int(stream), COUNT=64)
            one = slice(row, row + 1)
            assert torch.equal(words, noise_words(keys[one], indices[one], choices[one], stream, 256)[0])


def test_noise_is_equal_to_rounding():
    generator = torch.Generator().manual_seed(3)
    edges = torch.tensor([0, 1, 2, 2**23, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**8, 2**32 - 2, 2**32 - 1, 2**30])
    words = torch.cat((edges, torch.randint(0, 2**32, (500,), generator=generator), torch.randint(0, 2**20, (512,), generator=generator)))[:1024].to(
        DEVICE
    )
    noise = torch.full((1024,), float("nan"), device=DEVICE)
    write_noise[(1,)](words, noise, MAX_UNIFORM=MAX_UNIFORM, APPROXIMATE=DEVICE == "cuda", COUNT=1024)
    torch.testing.assert_close(noise, gumbel(words), atol=2e-6, rtol=1e-6)


@BACKENDS
@pytest.mark.parametrize("vocab_size", [7, 2059])
def test_is_the_argmax_of_logits_plus_noise(sample, vocab_size):
    temperatures, keys, indices, choices = rows([0.0, 1.0, 0.3, 0.0, 2.5])
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(DEVICE) * 3
    scores = logits + temperatures[:, None] * gumbel(noise_words(keys, indices, choices, Stream.TARGET, vocab_size))
    assert torch.equal(sample(logits, temperatures, keys, indices, choices, Stream.TARGET), scores.argmax(1))


@BACKENDS
def test_ties_bad_rows_and_forbidden_tokens(sample):
    temperatures, keys, indices, choices = rows([0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    logits = torch.zeros(6, 5000, device=DEVICE)
    logits[0, [4800, 4500, 4999]] = 2.0  # a tie: the lowest id
    logits[1, 4097] = float("nan")
    logits[2, 3] = float("nan")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 4321] = -50.0  # the only token allowed
    logits[5, 9] = float("inf")
    assert sample(logits, temperatures, keys, indices, choices, Stream.TARGET).tolist() == [4500, -1, -1, -1, 4321, -1]
