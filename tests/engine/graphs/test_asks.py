"""What a slot asks for, as numbers."""

import math
import random

import pytest
import torch

from specwire.engine.graphs.asks import ASKED, FILTERS, ON_HOST, REPORTS, acceptance_thresholds, asked_numbers
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams


def test_thresholds_compare_words_as_float64_compares_uniforms():
    rng = random.Random(1)
    rates = [0.0, 1.0, 0.5, 2.0**-33, 2.0**-32, 1.5 * 2.0**-32, 1.0 - 2.0**-53, math.nextafter(0.5, 0), 1e-300, *(rng.random() for _ in range(200))]
    for rate, threshold in zip(rates, acceptance_thresholds(rates, len(rates)), strict=True):
        assert 0 <= threshold <= 2**32
        for word in {0, threshold - 2, threshold - 1, threshold, threshold + 1, 2**32 - 1}:
            if not 0 <= word < 2**32:
                continue
            uniform = torch.tensor([word], dtype=torch.float64).add_(0.5).mul_(2.0**-32)
            assert bool(uniform < rate) == (word < threshold), (rate, word)
    assert acceptance_thresholds((1.0,), 3) == [2**32, 0, 0]
    assert acceptance_thresholds((1.0, 0.5, 0.25), 1) == [2**32]


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        (SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1), 0),  # greedy: nothing to filter
        (SamplingParams(temperature=1.0, top_k=99), 0),
        (SamplingParams(temperature=1.0, top_k=98), FILTERS),
        (SamplingParams(logprobs=0), REPORTS),
        (SamplingParams(stop_token_ids=(5,)), 0),  # without min_tokens
        (SamplingParams(temperature=1.0, top_p=0.5, logprobs=3, bad_words_token_ids=((5, 6),)), ON_HOST),
    ],
)
def test_only_what_changes_a_token_is_asked_for(params, flags):
    sampling = SlotSampling(params, key=1, vocab_size=99, token_ids=[1], num_prompt_tokens=1)
    numbers = asked_numbers(sampling)
    assert len(numbers) == ASKED
    assert numbers[0] == flags
