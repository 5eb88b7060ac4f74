"""Clusters with adaptive verification over scripted services that say what they cost."""

from collections.abc import Sequence
from typing import Any

from coordinator.adaptive import LanePolicy
from specwire.messages import DraftCost, VerifyCost
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

K = 5
VERIFY_COST = VerifyCost((1, 8, 16, 32, 64, 128), (4.0, 4.0, 4.2, 5.0, 8.0, 15.0))
DRAFT_COST = tuple(DraftCost(k, n, 0.1 * k + 0.01 * n) for k in (1, 3, 8) for n in (1, 4, 16))
VERIFIER = VerifierScript(verify_cost=VERIFY_COST)


def drafter(**changes: Any) -> DrafterScript:
    return DrafterScript(draft_cost=DRAFT_COST, **changes)


def adaptive_cluster(drafters: Sequence[DrafterScript] = (drafter(),), verifiers: Sequence[VerifierScript] = (VERIFIER,), **config: Any) -> Cluster:
    return Cluster(verifiers, drafters, adaptive=True, **{"k": K, "min_draft_wait_ms": 1000} | config)


def policy_of(cluster: Cluster, lane: int = 0) -> LanePolicy:
    policy = cluster.engine.lanes[lane].policy
    assert policy is not None, f"lane {lane} has no policy"
    return policy
