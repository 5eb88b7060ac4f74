"""Adaptive verification by a coordinator that has learned nothing yet, in bursts of some hundred steps, at costs as on an H200: exploring must cost
next to nothing where drafts don't pay, and drafts that do pay must be found."""

from dataclasses import replace

import pytest

from tests.coordinator.bursts import Models, run_bursts

VERIFY = ((1, 4.08), (4, 4.3), (16, 4.57), (64, 5.49), (128, 6.64), (256, 10.1), (512, 14.5), (1024, 25.0), (1536, 36.0), (3072, 68.0))
LLAMA_8B = Models(
    verify=VERIFY, draft=((1, 4.4), (16, 5.2), (64, 6.5), (128, 8.4), (256, 11.8)), k=5, chunk_tokens=512, chunk_ms=3.0, hop_ms=1.0,
    lockstep_ms=((1, 1.0), (128, 3.0), (256, 5.0)), draft_factor=1.4, acceptance=0.8,
)  # fmt: skip
"""With a draft model: by `specwire sweep`."""
SMOLLM_135M = Models(
    verify=((1, 0.77), (8, 1.35), (32, 1.9), (64, 2.3), (128, 3.07), (256, 4.87), (512, 6.0), (1536, 11.0), (3072, 20.0)),
    draft=((1, 0.42), (8, 0.65), (32, 1.1), (64, 1.76), (128, 2.9), (256, 5.6)), k=5, chunk_tokens=512, chunk_ms=1.5, hop_ms=0.8,
    lockstep_ms=((1, 1.0), (32, 1.6), (128, 3.0), (256, 4.0)), draft_factor=2.0, acceptance=0.4,
)  # fmt: skip
"""With its EAGLE-3 head, whose steps are three times as long as plain ones: by `benchmarks.gpu.draft_heads`."""
BLOCK = Models(
    verify=VERIFY, draft=((1, 0.6), (64, 1.0), (256, 2.2)), k=7, chunk_tokens=512, chunk_ms=1.0, hop_ms=0.6,
    lockstep_ms=((1, 1.5), (64, 4.0), (256, 10.0)), draft_factor=1.3, acceptance=0.8, has_fixed_draft=True,
)  # fmt: skip
"""Drafts of one layer."""


@pytest.mark.parametrize(
    ("models", "num_sequences", "num_prompt_tokens", "least"),
    [
        pytest.param(SMOLLM_135M, 8, 512, 0.98, id="head, 8"),
        pytest.param(SMOLLM_135M, 32, 512, 0.98, id="head, 32"),
        pytest.param(SMOLLM_135M, 128, 512, 0.98, id="head, 128"),
        pytest.param(LLAMA_8B, 16, 128, 0.98, id="draft model, 16"),
        pytest.param(LLAMA_8B, 64, 128, 0.98, id="draft model, 64"),
        pytest.param(LLAMA_8B, 256, 128, 0.98, id="draft model, 256"),
    ],
)
def test_where_drafts_do_not_pay(models: Models, num_sequences: int, num_prompt_tokens: int, least: float) -> None:
    """Two bursts of so many requests, 128 tokens each."""
    plain = run_bursts(models, num_sequences, 0, num_prompt_tokens=num_prompt_tokens)
    adaptive = run_bursts(models, num_sequences, None, num_prompt_tokens=num_prompt_tokens)
    assert adaptive.seconds <= plain.seconds / least
    assert not adaptive.fallbacks.get("drafter_timeout"), "no step waited in vain"
    assert adaptive.num_opens < num_sequences, "nor did the drafter compute prompts of sequences that it is not asked about"


@pytest.mark.parametrize(
    ("models", "num_sequences"),
    [pytest.param(BLOCK, 256, id="block, 256"), pytest.param(LLAMA_8B, 64, id="draft model, 64")],
)
def test_prompts_that_the_prefix_cache_has_say_nothing_of_what_large_rounds_cost(models: Models, num_sequences: int) -> None:
    """A chunk whose tokens are cached takes next to no time; had that made rounds of so many tokens seem cheap, all drafts would seem to pay."""
    models = replace(models, open_ms=0.06, chunk_ms=0.1)
    plain = run_bursts(models, num_sequences, 0, num_bursts=4, num_prompt_tokens=512, num_tokens=64, same_prompts=True)
    adaptive = run_bursts(models, num_sequences, None, num_bursts=4, num_prompt_tokens=512, num_tokens=64, same_prompts=True)
    assert adaptive.seconds <= plain.seconds / 0.96


@pytest.mark.parametrize(("num_sequences", "gain"), [(1, 2.0), (16, 1.4)])
def test_where_they_pay(num_sequences: int, gain: float) -> None:
    plain = run_bursts(BLOCK, num_sequences, 0)
    adaptive = run_bursts(BLOCK, num_sequences, None)
    assert adaptive.num_drafts > 20
    assert plain.seconds >= gain * adaptive.seconds


def test_a_lane_that_works_on_finds_out_what_a_prior_does_not_say() -> None:
    """Drafts that are nearly all accepted, which pay at 64 sequences; the first guess says that they don't."""
    good = Models(
        verify=VERIFY, draft=((1, 1.2), (64, 2.0)), k=3, chunk_tokens=512, chunk_ms=1.0, hop_ms=0.6, lockstep_ms=((1, 1.0), (64, 1.5)),
        draft_factor=1.1, acceptance=0.99, has_fixed_draft=True,
    )  # fmt: skip
    plain = run_bursts(good, 64, 0, num_bursts=1, num_tokens=600)
    adaptive = run_bursts(good, 64, None, num_bursts=1, num_tokens=600)
    assert plain.seconds >= 1.2 * adaptive.seconds
