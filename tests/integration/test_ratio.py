"""The ratio test through all services: sampled tokens have the target's distribution, whoever drafts and whatever is lost."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import drafter_svc.worker
from specwire.engine.block_manager import BlockManager
from specwire.engine.models.loader import load_model
from specwire.messages import Proposals, SpecStats
from specwire.sampling_params import SamplingParams
from tests.engine.tiny_models import compute, make_runner, save_tiny_model
from verifier_svc.verifier import Verifier

from .invariance import add_spec
from .reference import OneTokenLoop
from .tiny import TinyStack, drafter_config, tiny_stack, verifier_config

_K = 3
_TOP_K = 3
_NUM_TOKENS = 5
_NUM_SEEDS = 50
_CHOICES = 16
_PROMPT = [72, 105, 72, 105, 72]
_RATIO = {"rejection_sample_method": "probabilistic"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ratio") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[int, ...], float]:
    """Probability of each start of three tokens."""
    runner, _ = make_runner(load_model(folder, torch.float32, "cpu"))

    def following(tokens: Sequence[int]) -> list[tuple[int, float]]:
        manager = BlockManager(64)
        manager.open(0, list(tokens), b"")
        logits = compute(runner, manager, {0: tokens})[0][-1]
        best = logits.topk(_TOP_K)
        return list(zip(best.indices.tolist(), best.values.double().softmax(0).tolist(), strict=True))

    starts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        starts = {(*start, token): share * prob for start, share in starts.items() for token, prob in following([*_PROMPT, *start])}
    assert len(starts) == _TOP_K**3
    return starts


async def sample(stack: TinyStack) -> tuple[Counter[tuple[int, ...]], SpecStats]:
    """How often each start of three tokens came."""
    params = SamplingParams(temperature=1.0, top_k=_TOP_K, max_tokens=_NUM_TOKENS, n=_CHOICES, ignore_eos=True)
    results = await asyncio.gather(*(stack.client.generate(_PROMPT, params.replace(seed=seed)) for seed in range(_NUM_SEEDS)))
    spec = SpecStats()
    for choice in itertools.chain.from_iterable(result.choices for result in results):
        spec = add_spec(spec, choice.spec)
    return Counter(tuple(choice.token_ids[:3]) for result in results for choice in result.choices), spec


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square; starts that are too rare for it count as one."""
    assert counts.keys() <= expected.keys(), f"{counts.keys() - expected.keys()} can't be sampled"
    total = counts.total()
    frequent = [start for start, share in expected.items() if share * total >= 8]
    observed, wanted = [counts[start] for start in frequent], [expected[start] * total for start in frequent]
    observed.append(total - sum(observed))
    wanted.append(total - sum(wanted))
    assert len(frequent) > 5, f"only {len(frequent)} starts are frequent"
    return float(stats.chisquare(observed, wanted).pvalue)


def configs(folder: Path, speculation: dict[str, Any]) -> dict[str, Any]:
    return {
        "verifier": verifier_config(folder, num_speculative_tokens=_K, speculation=_RATIO, max_num_seqs=64),
        "drafter": drafter_config(folder, num_speculative_tokens=_K, speculation=speculation, max_num_seqs=64),
        "speculation": {"num_speculative_tokens": _K} | _RATIO,
    }


@pytest.mark.parametrize(
    "speculation",
    [_RATIO, {"draft_sharpness": 0.5}, _RATIO | {"draft_sample_method": "greedy"}],
    ids=["private noise", "drawn for a strict verifier", "greedy drafts"],
)
async def test_sampled_tokens_have_the_targets_distribution(
    socket_dir: Path, folder: Path, expected: dict[tuple[int, ...], float], speculation: dict[str, Any]
) -> None:
    async with tiny_stack(socket_dir, **configs(folder, speculation)) as stack:
        counts, spec = await sample(stack)
    assert counts.total() == _NUM_SEEDS * _CHOICES
    assert p_value(counts, expected) > 1e-3
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens, "one side of the test was not tried"


async def test_lost_rounds_do_not_bend_it(socket_dir: Path, folder: Path, expected: dict[tuple[int, ...], float]) -> None:
    """Rounds that fail on the verifier, drafts and all, are run again: with other drafts of other sequences beside them, and the same noise."""
    async with tiny_stack(socket_dir, **configs(folder, _RATIO)) as stack:
        fail_some_rounds(stack.verifier)
        counts, _ = await sample(stack)
        assert stack.coordinator.engine.counters.num_verifier_losses == 3
    assert p_value(counts, expected) > 1e-3


def fail_some_rounds(verifier: Verifier) -> None:
    """Three launches, by their number."""
    launch, numbers = verifier._executor.launch, itertools.count()

    def failing(*args: Any) -> Any:
        if next(numbers) in (8, 20, 31):
            raise RuntimeError("the device is gone")
        return launch(*args)

    verifier._executor.launch = failing  # type: ignore[method-assign]


async def test_greedy_requests_are_the_targets(socket_dir: Path, folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = OneTokenLoop(folder, 256, num_threads=1).generate(_PROMPT, params).token_ids
    async with tiny_stack(socket_dir, **configs(folder, _RATIO)) as stack:
        sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
        greedy, _ = await asyncio.gather(stack.client.generate(_PROMPT, params), stack.client.generate(_PROMPT, sampled))
    assert greedy.choices[0].token_ids == wanted
    assert greedy.spec.num_accepted_tokens == greedy.spec.num_draft_tokens > 0


@pytest.mark.parametrize(
    "wrong",
    [lambda p: Proposals(p.num_candidates, p.token_ids, [0.0] * len(p.probs)), lambda p: Proposals(p.num_candidates, p.token_ids[1:], p.probs[1:])],
    ids=["no chances", "too few"],
)
async def test_wrong_proposals_cost_drafts_and_nothing_else(
    socket_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Proposals], Proposals]
) -> None:
    join = drafter_svc.worker.join_proposals
    monkeypatch.setattr(drafter_svc.worker, "join_proposals", lambda rows: wrong(found) if (found := join(rows)) is not None else None)
    async with tiny_stack(socket_dir, **configs(folder, _RATIO)) as stack:
        result = await stack.client.generate(_PROMPT, SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True))
        counters = stack.coordinator.engine.counters
        assert len(result.choices[0].token_ids) == 20
        assert (result.spec.num_draft_tokens, counters.num_verifier_losses) == (0, 0)
        assert counters.num_garbage_drafts + counters.num_drafter_losses > 0
