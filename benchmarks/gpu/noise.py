"""The noise words as a kernel makes them on the device, beside those of the CPU: they must be the same, bit for bit."""

import random
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from specwire.engine.sampling.philox import Stream, key_to_int64, noise_words

_NUM_ROWS = 16


def check_noise(device: str, vocab_size: int) -> Iterator[dict[str, Any]]:
    """A row for each stream; raises where a word differs."""
    for stream in Stream:
        keys = torch.tensor([key_to_int64(key) for key in (0, 2**64 - 1, 2**63, *(random.getrandbits(64) for _ in range(_NUM_ROWS - 3)))])
        indices = torch.tensor([0, 1, 2**20, *(random.randrange(2**17) for _ in range(_NUM_ROWS - 3))])
        choices = torch.tensor([random.randrange(128) for _ in range(_NUM_ROWS)])
        expected = noise_words(keys, indices, choices, stream, vocab_size)
        words = device_words(keys.to(device), indices.to(device), choices.to(device), stream, vocab_size).cpu()
        different = int((words != expected).sum())
        yield {"stream": stream.name, "words": words.numel(), "different": different}
        assert not different, f"{different} of {words.numel()} words of stream {stream.name} differ"


def device_words(keys: torch.Tensor, indices: torch.Tensor, choices: torch.Tensor, stream: Stream, vocab_size: int) -> torch.Tensor:
    """As `noise_words`, with Triton's generator, which the sampling kernels use."""
    assert vocab_size % 4 == 0, vocab_size
    words = torch.empty((len(keys), vocab_size), dtype=torch.int64, device=keys.device)
    block = 512
    write_words[(triton.cdiv(vocab_size // 4, block), len(keys))](keys, indices, choices, words, vocab_size, STREAM=int(stream), BLOCK=block)
    return words


@triton.jit
def write_words(keys, indices, choices, words, vocab_size, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of four tokens, rows)."""
    row = tl.program_id(1)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row).to(tl.uint32)
    choice = tl.load(choices + row).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(tl.load(keys + row), block.to(tl.uint32), index, choice, tl.full([], STREAM, tl.uint32))
    target = words + row.to(tl.int64) * vocab_size + 4 * block
    real = 4 * block < vocab_size
    tl.store(target, word0.to(tl.int64), real)
    tl.store(target + 1, word1.to(tl.int64), real)
    tl.store(target + 2, word2.to(tl.int64), real)
    tl.store(target + 3, word3.to(tl.int64), real)
