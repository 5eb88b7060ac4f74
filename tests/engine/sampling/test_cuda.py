"""The same code on a CUDA device: equal words, equal tokens."""

import pytest
import torch

from specwire.engine.sampling.draft import sample_draft
from specwire.engine.sampling.philox import Stream, gumbel, key_to_int64, noise_words, noise_words_at
from specwire.engine.sampling.segments import SegmentRows, SegmentTokens, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = [
    SamplingParams(logprobs=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.2),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=40, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    SamplingParams(temperature=0.7, logit_bias={5: 3.0}, bad_words_token_ids=((7,), (1, 8)), min_tokens=4, logprobs=0),
    SamplingParams(temperature=0.7, allowed_token_ids=tuple(range(0, 4000, 3))),
]


def test_words_are_bit_identical() -> None:
    keys, indices, choices = torch.tensor([7, key_to_int64(2**64 - 3)]), torch.tensor([12, 2**31]), torch.tensor([0, 5])
    token_ids = torch.tensor([[0, 7, 128_255], [1, 2, 3]])
    words = noise_words(keys, indices, choices, Stream.TARGET, 128_256)
    on_device = noise_words(keys.cuda(), indices.cuda(), choices.cuda(), Stream.TARGET, 128_256)
    assert torch.equal(on_device.cpu(), words)
    chosen = noise_words_at(keys.cuda(), indices.cuda(), choices.cuda(), Stream.TARGET, token_ids.cuda())
    assert torch.equal(chosen.cpu(), words.gather(1, token_ids))
    torch.testing.assert_close(gumbel(on_device).cpu(), gumbel(words), atol=2e-6, rtol=2e-6)


def _sample(device: str, logits: torch.Tensor, vocab_size: int) -> list[SegmentTokens]:
    segments = []
    for key, params in enumerate(PARAMS * 4):
        slot = SlotSampling(params, key=key, vocab_size=vocab_size, token_ids=[3, 1, 4, 1], num_prompt_tokens=3, eos_token_ids=(2,), device=device)
        segments.append(SegmentRows(slot, 4, (1, 8)))
    return sample_segments(logits.to(device), segments, margins=True)


@pytest.mark.parametrize("vocab_size", [4000, 32_768])
def test_tokens_equal_those_of_the_cpu(vocab_size: int) -> None:
    logits = 3 * torch.randn(len(PARAMS) * 4 * 3, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[4, 9] = torch.nan
    results = zip(_sample("cpu", logits, vocab_size), _sample("cuda", logits, vocab_size), strict=True)
    for expected, result in results:
        assert expected.margins is not None
        if not any(margins.is_near_tie for margins in expected.margins):
            assert (result.token_ids, result.is_bad) == (expected.token_ids, expected.is_bad)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_equal_those_of_the_cpu(temperature: float) -> None:
    logits = 3 * torch.randn(50, 4000, generator=torch.Generator().manual_seed(1))
    target_ids = torch.arange(4000) * 3
    for ids in (None, target_ids):
        on_cpu, on_device = (
            sample_draft(
                logits.to(device),
                temperatures=[temperature] * 50,
                keys=range(50),
                indices=range(50),
                choices=[0] * 50,
                target_ids=None if ids is None else ids.to(device),
                target_vocab_size=12_000,
            )
            for device in ("cpu", "cuda")
        )
        assert torch.equal(on_device.token_ids.cpu(), on_cpu.token_ids)
        torch.testing.assert_close(on_device.probs.cpu(), on_cpu.probs, atol=1e-5, rtol=1e-4)
