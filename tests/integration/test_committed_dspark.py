"""The trained DSpark head of the default model behind real services: it drafts what is accepted, and no token differs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .invariance import check, run
from .matrix import Configuration, fleet_configs, load_cases
from .reference import OneTokenLoop
from .stack import Fleet

_HEAD = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct-dspark"
_K = 5


@pytest.fixture
def its_fleet(socket_dir: Path) -> Iterator[Fleet]:
    """Services of the matrix, whose verifier keeps this head's features; those that are asked for start."""
    fleet = Fleet(socket_dir, fleet_configs(head=_HEAD))
    yield fleet
    fleet.stop()


async def test_the_committed_head_drafts_the_targets_tokens(target: OneTokenLoop, its_fleet: Fleet, socket_dir: Path) -> None:
    cases = load_cases(target.tokenizer, num_prompts=2, samplings=("greedy", "T=0.7 top_p=0.95"), max_tokens=24)
    expected = {index: target.generate(case.prompt_token_ids, case.params) for index, case in enumerate(cases)}
    configuration = Configuration(f"dspark K={_K}", drafters=("dspark",), speculation={"num_speculative_tokens": _K})
    outcome = await run(configuration, its_fleet, socket_dir, cases, expected)
    check(outcome)  # also that drafts were accepted
    assert outcome.num_tokens == sum(len(one.token_ids) for one in expected.values())
    assert outcome.first_draft_acceptance > 0.25, outcome.to_json()
