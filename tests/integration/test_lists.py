"""Lists of methods with a draft model or head behind real services: the target's text, fewer rows for the model, and counts of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.metrics import SPARED_ROWS
from drafter_svc.model_and_lookups import ModelAndLookups
from specwire.client.aio import AsyncClient
from specwire.sampling_params import SamplingParams
from tests.engine.tiny_models import save_tiny_model
from tests.heads.checkpoints import WRITERS
from tests.heads.target import Target, make_target

from .reference import OneTokenLoop
from .tiny import drafter_config, tiny_stack, verifier_config

COMMON = [(11 * index * index + 5) % 250 for index in range(40)]
PROMPTS = [COMMON[:40], [*COMMON[:36], 7, 7], [3, 5] * 10, [9, 8, 7], COMMON[20:], [4] * 30]
SAMPLING = [
    SamplingParams(
        temperature=0.3 * (i % 2), seed=i, max_tokens=24 if i == 0 else 80, ignore_eos=True, allowed_token_ids=(3, 5, 90) if i % 3 else None
    )
    for i in range(len(PROMPTS))
]
"""Those with three tokens to choose from repeat themselves."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By method."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "draft", seed=5)
    heads = {name.partition("_")[0]: WRITERS[name](folder / name).folder for name in ("eagle3_speculators", "dspark_native")}
    return {"draft_model": folder / "draft", **heads}


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """What the target says alone."""
    loop = OneTokenLoop(target.folder, 256, num_threads=1)
    return [loop.generate(prompt, params).token_ids for prompt, params in zip(PROMPTS, SAMPLING, strict=True)]


async def leave_early(client: AsyncClient) -> None:
    """A request that is cancelled once it has some tokens."""
    async for event in client.stream(PROMPTS[0], SAMPLING[0]):
        if event.token_ids:
            return


@pytest.mark.parametrize("method", [("ngram", "eagle3"), ("ngram", "dspark"), ("draft_model", "suffix", "ngram")], ids="+".join)
async def test_a_list_with_a_model_says_what_the_target_says(socket_dir: Path, target, models, plain, method: tuple[str, ...]) -> None:
    """With all requests at once nothing is drafted until some have ended, so that all that is left has to be caught up with."""
    model = next(models[name] for name in method if name in models)
    spec: dict[str, Any] = {"method": list(method), "model": str(model), "num_speculative_tokens": 4}
    drafter = drafter_config(target.folder, speculation=spec, target_model=str(target.folder))
    verifier = verifier_config(target.folder, speculation=spec, max_num_batched_tokens=48, num_kv_blocks=256)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 5, 4], [6, 64, 0]]}
    async with tiny_stack(socket_dir, verifier, drafter, speculation=spec | schedule) as stack:
        assert stack.drafter is not None
        served = stack.drafter.worker.ready.result()
        assert isinstance(served, ModelAndLookups)
        assert served.description.method == "+".join(method)
        for _ in range(2):
            texts = await asyncio.gather(*(stack.client.generate(prompt, one) for prompt, one in zip(PROMPTS, SAMPLING, strict=True)))
            assert [text.token_ids for text in texts] == plain, "drafts changed the text"
            await leave_early(stack.client)
        assert served.counts.num_spared_rows > 10
        assert served.counts.num_eager_passes > 10
        assert sum(text.spec.num_accepted_tokens for text in texts) > 20
        [spared] = [sample.value for sample in stack.drafter.worker.metrics.collect() if sample.metric is SPARED_ROWS]
        assert spared == served.counts.num_spared_rows
        if served.features is not None:
            assert sum(served.features.counts.num_spans.values()) > 20


async def test_adaptive_verification_goes_by_the_scores_of_a_list(socket_dir: Path, target, models, plain) -> None:
    spec: dict[str, Any] = {"method": ["ngram", "draft_model"], "model": str(models["draft_model"]), "num_speculative_tokens": 4}
    verifier = verifier_config(target.folder, speculation=spec, num_kv_blocks=256)
    adaptive = spec | {"enable_adaptive_verification": True}
    async with tiny_stack(socket_dir, verifier, drafter_config(target.folder, speculation=spec), speculation=adaptive) as stack:
        for _ in range(2):
            texts = await asyncio.gather(*(stack.client.generate(prompt, one) for prompt, one in zip(PROMPTS, SAMPLING, strict=True)))
            assert [text.token_ids for text in texts] == plain, "drafts changed the text"
        assert stack.drafter is not None
        assert stack.drafter.worker.metrics.num_draft_tokens > 0
