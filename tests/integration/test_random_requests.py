"""Random requests with any mix of parameters through random stacks: each choice is what the one-token reference gives."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from specwire.client.results import GenerationResult
from specwire.sampling_params import SamplingParams
from tests.engine.tiny_models import save_tiny_model

from .noisy_model import save_noisy
from .reference import OneTokenLoop
from .tiny import drafter_config, tiny_stack, verifier_config

_MAX_MODEL_LEN = 96
_NUM_REQUESTS = 30
_VOCAB_SIZE = 259
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and a draft model that is right more often than not."""
    root = tmp_path_factory.mktemp("random")
    save_tiny_model(root / "target", eos_token_id=[257, 5, 9])
    save_noisy(root / "target", root / "draft", 0.03)
    return root / "target", root / "draft"


def random_params(rng: random.Random) -> SamplingParams:
    """Most parameters at their defaults."""
    options: list[tuple[float, dict[str, Any]]] = [
        (0.6, {"temperature": rng.choice([0.3, 0.8, 1.5])}),
        (0.3, {"top_p": rng.choice([0.5, 0.9, 0.99])}),
        (0.3, {"top_k": rng.choice([1, 2, 10, 100])}),
        (0.2, {"min_p": rng.choice([0.02, 0.2])}),
        (0.3, {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1)}),
        (0.2, {"repetition_penalty": rng.choice([0.8, 1.3])}),
        (0.2, {"logit_bias": {rng.randrange(_VOCAB_SIZE): rng.uniform(-5, 5) for _ in range(3)}}),
        (0.2, {"bad_words_token_ids": tuple(_random_ids(rng, rng.randrange(1, 3)) for _ in range(40))}),
        (0.2, {"min_tokens": rng.randrange(10)}),
        (0.2, {"logprobs": rng.randrange(4)}),
        (0.2, {"max_draft_tokens": rng.randrange(4)}),
        (0.2, {"stop_token_ids": _random_ids(rng, 20)}),
        (0.2, {"priority": rng.randrange(-2, 3)}),
        (0.3, {"n": rng.choice([2, 3])}),
    ]
    chosen: dict[str, Any] = {}
    for probability, values in options:
        if rng.random() < probability:
            chosen |= values
    return SamplingParams(seed=rng.getrandbits(64), max_tokens=rng.randrange(10, 40), **chosen)


def random_requests(rng: random.Random) -> list[Request]:
    """Half of the prompts begin alike."""
    common = _random_ids(rng, 60)
    prompts = [(common if rng.random() < 0.5 else _random_ids(rng, 60))[: rng.randrange(1, 50)] for _ in range(_NUM_REQUESTS)]
    return [(list(prompt), random_params(rng)) for prompt in prompts]


def _random_ids(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(num))


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
async def test_random_requests_are_the_references(socket_dir: Path, folders: tuple[Path, Path], seed: int) -> None:
    rng = random.Random(seed)
    target, draft = folders
    requests = random_requests(rng)
    verifier = verifier_config(
        target, max_model_len=_MAX_MODEL_LEN, num_kv_blocks=rng.choice([12, 16, 24, 64]), max_num_seqs=rng.choice([3, 8, 16]),
        max_num_batched_tokens=rng.choice([16, 40, 128]), enable_prefix_caching=rng.random() < 0.7,
    )  # fmt: skip
    drafter = drafter_config(rng.choice([target, draft]), max_num_seqs=rng.choice([2, 6, 32]), prefill_chunk=rng.choice([8, 64]))
    k = rng.randrange(1, 9)
    speculation: dict[str, Any] = {"num_speculative_tokens": k}
    if rng.random() < 0.4:
        speculation["num_speculative_tokens_per_batch_size"] = [[1, 2, k], [3, 5, 0], [6, 64, -(-k // 2)]]
    async with tiny_stack(
        socket_dir,
        verifier,
        drafter,
        speculation=speculation,
        max_outstanding_rounds=rng.choice([1, 2]),
        min_draft_wait_ms=rng.choice([5.0, 60_000.0]),
    ) as stack:
        results = await asyncio.gather(*(stack.client.generate(prompt, params) for prompt, params in requests))
        assert stack.coordinator.engine.counters.num_draft_tokens > 0
        assert stack.coordinator.engine.counters.num_accepted_tokens > 0
    reference = OneTokenLoop(target, _MAX_MODEL_LEN, num_threads=1)
    num_excused = sum(check_request(reference, request, result) for request, result in zip(requests, results, strict=True))
    assert num_excused < 3


def check_request(reference: OneTokenLoop, request: Request, result: GenerationResult) -> int:
    """How many choices differ from the reference where a near tie excuses it; asserts that the others are equal."""
    prompt, params = request
    num_excused = 0
    for choice in result.choices:
        expected = reference.generate(prompt, params, choice=choice.index)
        if choice.token_ids != expected.token_ids:
            position = next(i for i, pair in enumerate(zip(choice.token_ids, expected.token_ids, strict=False)) if pair[0] != pair[1])
            assert expected.margins[position].is_near_tie, (request, choice, expected)
            num_excused += 1
            continue
        assert choice.finish_reason == expected.finish_reason, (request, choice)
        assert choice.text == expected.text
        assert choice.usage.num_generated_tokens == len(expected.token_ids)
        assert (choice.logprobs is None) == (params.logprobs is None)
        for ours, theirs in zip(choice.logprobs or (), expected.logprobs or (), strict=True):
            assert ours.sampled == pytest.approx(theirs.sampled, abs=1e-3)
            assert ours.top == [(token_id, pytest.approx(logprob, abs=1e-3)) for token_id, logprob in theirs.top]
    assert len(result.choices) == params.n
    return num_excused
