"""No drafter, schedule, loss or batch changes a token: real model, real services."""

from pathlib import Path

import pytest

from benchmarks.invariance import run_matrix
from specwire.config import DEFAULT_MODEL
from specwire.engine.checkpoint import resolve_model
from tests.heads.checkpoints import WRITERS

from .invariance import check, compare, run, transformers_greedy
from .matrix import Case, Configuration, crossing_zero, fleet_configs, full_matrix, head_method, load_cases
from .reference import Expected, OneTokenLoop
from .stack import Fleet

_REDUCED = [
    Configuration("no drafter"),
    Configuration("ngram K=5", drafters=("ngram",), speculation={"num_speculative_tokens": 5}),
    Configuration("adaptive, ngram K=5", drafters=("ngram",), speculation={"num_speculative_tokens": 5, "enable_adaptive_verification": True}),
    Configuration("suffix K=5", drafters=("suffix",), speculation={"num_speculative_tokens": 5}),
    Configuration("eagle3 K=5", drafters=("eagle3",), speculation={"num_speculative_tokens": 5}),
    crossing_zero("ngram and eagle3", (2, 2, 2), 5, "schedule crossing K=0, ngram and eagle3"),
    Configuration("garbage drafter K=5", drafters=("garbage",), speculation={"num_speculative_tokens": 5}, accepts=False),
    Configuration("drafter killed half-way", drafters=("noisy",), speculation={"num_speculative_tokens": 4}, kill="noisy"),
    crossing_zero("noisy", (2, 2, 2), 4),
    Configuration("ngram and draft_model K=4", drafters=("mixed",), speculation={"num_speculative_tokens": 4}),
    Configuration("two verifiers, one killed half-way", ("verifier", "scarce"), ("ngram",), {"num_speculative_tokens": 3}, kill="scarce"),
]


@pytest.fixture(scope="module")
def cases(target: OneTokenLoop) -> list[Case]:
    return load_cases(target.tokenizer, num_prompts=3, samplings=("greedy", "T=0.7 top_p=0.95"), max_tokens=24)


@pytest.fixture(scope="module")
def expected(target: OneTokenLoop, cases: list[Case]) -> dict[int, Expected]:
    return {index: target.generate(case.prompt_token_ids, case.params) for index, case in enumerate(cases)}


@pytest.mark.parametrize("configuration", _REDUCED, ids=lambda configuration: configuration.name)
async def test_no_configuration_changes_a_token(
    configuration: Configuration, fleet: Fleet, socket_dir: Path, cases: list[Case], expected: dict[int, Expected]
) -> None:
    outcome = await run(configuration, fleet, socket_dir, cases, expected)
    check(outcome)


async def test_preemption_changes_no_token(fleet: Fleet, socket_dir: Path, target: OneTokenLoop) -> None:
    """Of longer answers: with short ones it depends on what ends first whether blocks run out."""
    cases = load_cases(target.tokenizer, num_prompts=3, samplings=("greedy", "T=0.7 top_p=0.95"), max_tokens=64)
    expected = {index: target.generate(case.prompt_token_ids, case.params) for index, case in enumerate(cases)}
    configuration = Configuration("forced preemption, draft_model K=3", ("scarce",), ("noisy",), {"num_speculative_tokens": 3}, preempts=True)
    check(await run(configuration, fleet, socket_dir, cases, expected))


def test_the_reference_is_what_transformers_generates(cases: list[Case], expected: dict[int, Expected]) -> None:
    greedy = [index for index, case in enumerate(cases) if case.params.is_greedy]
    texts = transformers_greedy(resolve_model(DEFAULT_MODEL), [cases[index] for index in greedy])
    assert len(texts) == 3
    for index, text in zip(greedy, texts, strict=True):
        difference = compare(cases[index], expected[index], text, expected[index].finish_reason)
        assert difference is None or difference.is_excused, difference


@pytest.mark.parametrize("name", ["eagle3_speculators", "dspark_native"])
def test_the_full_matrix_is_that_of_any_head(name: str, tmp_path: Path) -> None:
    head = WRITERS[name](tmp_path / name).folder
    method = head_method(head)
    configurations = full_matrix(method)
    assert {service for one in configurations for service in one.services} <= fleet_configs("a model", tmp_path, head).keys()
    with_head = [one for one in configurations if one.has_head(method)]
    assert len(with_head) == 10
    assert all(one.has_head(method) == any(method in drafter for drafter in one.drafters) for one in configurations)
    assert sum(bool(one.kill) for one in with_head) == 2


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_full_matrix() -> None:
    """12 prompts with every sampling through every configuration; benchmarks/results/invariance.json is a run of it."""
    total = run_matrix()["total"]
    assert total["differences"] == 0
    assert total["configurations"] == len(full_matrix())
    assert total["tokens_compared"] > 25_000
