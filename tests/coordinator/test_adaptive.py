"""Adaptive verification in the coordinator: the same tokens whatever is verified."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.adaptive import LanePolicy
from coordinator.choice import Choice
from coordinator.plan import Plan
from specwire.policy.adaptive import AdaptivePolicy, Kept
from specwire.policy.grades import NUM_GRADES
from specwire.policy.step_plan import DraftRequest
from tests.coordinator.adaptive_cluster import VERIFIER, K, adaptive_cluster, drafter, policy_of
from tests.coordinator.test_invariance import check_all, submit_all, until_tokens
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import GARBAGE

NAN = float("nan")
_random = random.Random(1)
SCORES: dict[str, Callable[[bool, int], float | None]] = {
    "none": lambda is_right, position: None,
    "zero": lambda is_right, position: 0.0,
    "one": lambda is_right, position: 1.0,
    "right": lambda is_right, position: 0.95 if is_right else 0.05,
    "wrong": lambda is_right, position: 0.05 if is_right else 0.95,
    "random": lambda is_right, position: _random.random(),
    "nan": lambda is_right, position: NAN,
    "sometimes nan": lambda is_right, position: NAN if _random.random() < 0.1 else _random.random(),
    "0, 1 or nan": lambda is_right, position: _random.choice((0.0, 1.0, NAN)),
}


@pytest.mark.parametrize(("scores", "grpc"), [*((scores, False) for scores in SCORES), ("none", True), ("random", True), ("sometimes nan", True)])
async def test_whatever_the_scores(scores: str, grpc: bool) -> None:
    async with adaptive_cluster([drafter(acceptance=0.7, score=SCORES[scores])], grpc=grpc) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert cluster.engine.counters.num_draft_tokens > 50
        assert policy_of(cluster).policy.calibrator.trials.any()
        assert cluster.engine.counters.num_garbage_drafts == 0
        assert (cluster.engine.counters.num_nan_scores > 0) == ("nan" in scores)


@pytest.mark.parametrize(("seed", "scores"), [(0, "right"), (1, "zero"), (2, "one"), (3, "sometimes nan"), (4, "0, 1 or nan")])
async def test_whatever_is_asked_for_and_kept(seed: int, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K_request changes at random from step to step, 0 included, and from sequence to sequence; each row keeps a random number of its drafts,
    whatever their scores; some answers come too late."""
    rng = random.Random(seed)
    choose_kept, choose_request = AdaptivePolicy.choose_kept, AdaptivePolicy.choose_request
    num_kept = []

    def keep(self: AdaptivePolicy, *args: Any, is_sent: bool) -> Kept:
        kept = choose_kept(self, *args, is_sent=is_sent)
        num_kept.append(args[2] if is_sent else np.array([rng.randint(0, number) for number in args[2].tolist()], dtype=np.int64))
        return replace(kept, num_kept=num_kept[-1])

    def request(self: AdaptivePolicy, step: int, shape: Any, num_sampling: int, most: int, count_grades: Any, room: Any) -> DraftRequest:
        choose_request(self, step, shape, num_sampling, most, count_grades, room)
        choices = random.Random(seed << 20 | step)
        number = min(most, choices.choice((0, 0, 1, 3, K)))
        by_grade = (number, *(choices.randint(0, number) for _ in range(NUM_GRADES - 1)))
        if number and rng.random() < 0.1:
            return DraftRequest(number, is_probe=True, is_lone=True, num_asked=(rng.randint(1, 8),) * number)
        return DraftRequest(number, is_probe=rng.random() < 0.2, by_grade=choices.choice(((), by_grade)))

    def delay_s(message: object) -> float:
        return 0.03 if rng.random() < 0.05 else 0.0

    monkeypatch.setattr(AdaptivePolicy, "choose_kept", keep)
    monkeypatch.setattr(AdaptivePolicy, "choose_request", request)
    drafters = [drafter(acceptance=0.7, score=SCORES[scores], delay_s=delay_s)] * 2
    async with adaptive_cluster(drafters, max_outstanding_rounds=1 + seed % 3, min_draft_wait_ms=15) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert sum(map(np.sum, num_kept)) == cluster.verifiers[0].num_draft_tokens
        assert cluster.engine.counters.num_rows - cluster.engine.counters.num_drafts > 60


@pytest.mark.parametrize("keeps_right", [False, True])
async def test_a_budget_that_looks_at_the_drafts_themselves(keeps_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It verifies only drafts that will be accepted, or only rows whose first one will not be: what is emitted stays the target's."""
    keep = LanePolicy.keep

    def look(self: LanePolicy, choice: Choice, plan: Plan, drafts: list[list[int]]) -> list[list[int]]:
        kept = []
        for sequence, draft in zip(plan.decodes, keep(self, choice, plan, drafts), strict=True):
            prompt, known = sequence.token_ids[: sequence.num_prompt_tokens], sequence.num_generated_tokens
            text = cluster.verifiers[0].target.generate(prompt, known + len(draft), sequence.request.noise_key, sequence.choice)
            num_right = next((i for i, token in enumerate(draft) if token != text[known + i]), len(draft))
            kept.append(draft[:num_right] if keeps_right else draft if not num_right else [])
        if choice.kept is not None:
            choice.kept = replace(choice.kept, num_kept=np.array([len(kept[row]) for row in choice.rows], dtype=np.int64))
        return kept

    monkeypatch.setattr(LanePolicy, "keep", look)
    async with adaptive_cluster([drafter(acceptance=0.6)]) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        counters = cluster.engine.counters
        assert counters.num_draft_tokens > 30
        assert counters.num_accepted_tokens == (counters.num_draft_tokens if keeps_right else 0)


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage(kind: str) -> None:
    async with adaptive_cluster([drafter(garbage=(kind,))]) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert cluster.engine.counters.num_bad_rows == 0


@pytest.mark.parametrize("grpc", [False, True])
async def test_stale_drafts(grpc: bool) -> None:
    """Every third reply comes too late: it is used only where it is still fresh, and says nothing of the drafts."""
    num_rounds = 0

    def delay_s(message: object) -> float:
        nonlocal num_rounds
        num_rounds += 1
        return 0.05 if num_rounds % 3 == 0 else 0.0

    async with adaptive_cluster([drafter(delay_s=delay_s)], [replace(VERIFIER, delay_s=0.002)], grpc=grpc, min_draft_wait_ms=10) as cluster:
        await check_all(submit_all(await cluster.all_there(), max_tokens=100))
        counters, calibrator = cluster.engine.counters, policy_of(cluster).policy.calibrator
        assert counters.num_drafter_timeouts > 2
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 50
        assert (calibrator.trials == calibrator.accepted).all(), "no draft was seen to fail"


@pytest.mark.parametrize("grpc", [False, True])
async def test_a_drafter_dies_and_comes_back(grpc: bool) -> None:
    async with adaptive_cluster([drafter()], [replace(VERIFIER, delay_s=0.002)], grpc=grpc) as cluster:
        running = submit_all(await cluster.all_there(), max_tokens=200)
        await until_tokens(running, 200)
        await cluster.kill_drafter(0)
        await cluster.until(lambda: cluster.engine.counters.num_drafter_losses == 1)
        num_before = cluster.engine.counters.num_draft_tokens
        await until_tokens(running, 600)
        await cluster.restart_drafter(0)
        await cluster.all_there()
        await check_all(running)
        counters = cluster.engine.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > num_before > 0
        assert counters.fallbacks["no_drafter"] > 0, "as with fixed K, it is said that drafts are missing"


async def test_one_of_two_drafters_dies_and_a_verifier_too() -> None:
    slow = replace(VERIFIER, delay_s=0.001)
    async with adaptive_cluster([drafter(), drafter(acceptance=0.5)], [slow, slow]) as cluster:
        running = submit_all(await cluster.all_there(), max_tokens=120)
        assert policy_of(cluster, 0).policy.calibrator is policy_of(cluster, 1).policy.calibrator
        await until_tokens(running, 150)
        await cluster.kill_drafter(0)
        await until_tokens(running, 300)
        await cluster.kill_verifier(1)
        await until_tokens(running, 450)
        await cluster.restart_verifier(1)
        await check_all(running)


async def test_lost_rows_say_nothing() -> None:
    """A verifier that now and then answers STALE: such rows teach nothing, though their drafts were right."""
    num_rows = 0

    def lose_row(round_: int, row: object) -> bool:
        nonlocal num_rows
        num_rows += 1
        return num_rows % 11 == 0

    async with adaptive_cluster(verifiers=[replace(VERIFIER, lose_row=lose_row)]) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert cluster.engine.counters.num_stale_rows > 5
        calibrator = policy_of(cluster).policy.calibrator
        assert calibrator.trials.sum() > 50
        assert (calibrator.trials == calibrator.accepted).all()


async def test_the_requests_own_limits_hold() -> None:
    limits = (None, 0, 1, 3, None, 0)
    async with adaptive_cluster() as cluster:
        await cluster.all_there()
        running = [cluster.submit([5 + seed], seed=seed, max_tokens=80, max_draft_tokens=most) for seed, most in enumerate(limits)]
        await check_all(running)
        for request, most in zip(running, limits, strict=True):
            stats = request.sink.choices[0].spec_stats
            assert (stats.num_draft_tokens > 0) == (most != 0)
            assert most is None or stats.num_draft_tokens <= most * stats.num_drafts


async def test_a_cluster_without_adaptive_verification_has_no_policy() -> None:
    async with Cluster([VERIFIER], [drafter()]) as cluster:
        await cluster.all_there()
        assert cluster.engine.lanes[0].policy is None
