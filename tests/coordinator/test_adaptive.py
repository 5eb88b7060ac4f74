"""Adaptive verification in the coordinator: the same tokens whatever is verified, and choices that follow what drafts bring."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.adaptive import LanePolicy
from specwire.messages import DraftCost, VerifyCost, VerifyRound
from tests.coordinator.test_invariance import check_all, submit_all
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

NAN = float("nan")
K = 5
VERIFY_COST = VerifyCost((1, 8, 16, 32, 64, 128), (4.0, 4.0, 4.2, 5.0, 8.0, 15.0))
DRAFT_COST = tuple(DraftCost(k, n, 0.1 * k + 0.01 * n) for k in (1, 3, 8) for n in (1, 4, 16))
VERIFIER = VerifierScript(verify_cost=VERIFY_COST)


def drafter(**changes: Any) -> DrafterScript:
    return DrafterScript(draft_cost=DRAFT_COST, **changes)


def adaptive(verifiers: list[VerifierScript] | None = None, drafters: list[DrafterScript] | None = None, **config: Any) -> Cluster:
    return Cluster(verifiers or [VERIFIER], drafters or [drafter()], adaptive=True, **{"k": K, "min_draft_wait_ms": 1000} | config)


def policy_of(cluster: Cluster, lane: int = 0) -> LanePolicy:
    policy = cluster.engine.lanes[lane].policy
    assert policy is not None, "the lane has no policy"
    return policy


def num_drafts(message: VerifyRound) -> int:
    return sum(len(row.draft_tokens) for row in message.rows)


_random = random.Random(1)
SCORES: dict[str, Callable[[bool, int], float | None]] = {
    "none": lambda is_right, position: None,
    "zero": lambda is_right, position: 0.0,
    "one": lambda is_right, position: 1.0,
    "right": lambda is_right, position: 0.95 if is_right else 0.05,
    "wrong": lambda is_right, position: 0.05 if is_right else 0.95,
    "random": lambda is_right, position: _random.random(),
    "sometimes nan": lambda is_right, position: NAN if _random.random() < 0.1 else _random.random(),
}


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("scores", SCORES)
async def test_same_tokens_whatever_the_scores(scores: str, grpc: bool) -> None:
    if grpc and scores == "none":
        pytest.skip("the wire refuses drafts without scores")
    async with adaptive(drafters=[drafter(acceptance=0.7, score=SCORES[scores])], grpc=grpc) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert cluster.engine.counters.num_draft_tokens > 50
        assert policy_of(cluster).policy.calibrator.trials.any()
