"""Canaries that differ from their base in adaptive verification, or in the method of their drafters."""

import asyncio
import json

import pytest

from coordinator.variants import BASE, CANARY
from specwire.errors import FailedPreconditionError
from specwire.messages import CanaryAction, VerifyCost
from tests.coordinator.adaptive_cluster import VERIFIER, drafter
from tests.coordinator.test_variants import PROMOTE, ROLL_BACK, START, submit
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript


@pytest.mark.parametrize("is_canary_adaptive", [True, False])
async def test_one_of_them_adaptive(is_canary_adaptive: bool) -> None:
    """Wrong drafts have bad scores, and tokens are dear: the adaptive ones verify hardly any of them, the others all. Tokens are the same."""
    script = drafter(acceptance=0.5, score=lambda is_right, position: 0.9 if is_right else 0.1)
    verifiers = [VerifierScript(verify_cost=VerifyCost((1, 128), (4.0, 30.0)), max_num_seqs=8)]
    async with Cluster(verifiers, [script], k=4, adaptive=not is_canary_adaptive, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.0, json.dumps({"enable_adaptive_verification": is_canary_adaptive}))
        for batch in range(3):
            seeds = range(4 * batch, 4 * batch + 4)
            await asyncio.gather(*[submit(cluster, variant, seed, 100).check() for seed in seeds for variant in (BASE, CANARY)])
        base, canary = cluster.engine.variants.status()
        chosen, all_ = (canary, base) if is_canary_adaptive else (base, canary)
        assert (chosen.num_ended, all_.num_ended) == (12, 12)
        assert chosen.num_generated_tokens == all_.num_generated_tokens == 1200
        assert all_.num_draft_tokens / all_.num_drafts > 3.5
        assert all_.num_accepted_tokens / all_.num_draft_tokens < 0.4
        assert chosen.num_accepted_tokens / chosen.num_draft_tokens > 0.6
        policy = cluster.engine.lanes[0].policy
        assert policy is not None
        assert policy.fallback == ""


@pytest.mark.parametrize(("action", "is_adaptive"), [(PROMOTE, True), (ROLL_BACK, False)])
async def test_adaptive_begins_and_ends_while_requests_run(action: CanaryAction, is_adaptive: bool) -> None:
    async with adaptive_off() as cluster:
        await cluster.all_there()
        lane = cluster.engine.lanes[0]
        assert lane.policy is None
        running = [submit(cluster, "", seed, 200) for seed in range(4)]
        await cluster.until(lambda: all(len(each.sink.choices[0].token_ids) > 5 for each in running))
        cluster.engine.set_canary(START, 0.5, '{"enable_adaptive_verification": true}')
        running += [submit(cluster, variant, seed, 200) for seed, variant in enumerate((BASE, CANARY), start=4)]
        await cluster.until(lambda: all(len(each.sink.choices[0].token_ids) > 20 for each in running))
        assert lane.policy is not None
        cluster.engine.set_canary(action, 0.0, "")
        assert (lane.policy is not None, lane.is_canary_adaptive) == (is_adaptive, None)
        await asyncio.gather(*[each.check() for each in running], submit(cluster, "", 9).check())
        effective = {setting.key: setting.value for setting in cluster.engine.speculation}
        assert effective["enable_adaptive_verification"] is is_adaptive
        await cluster.restart_verifier(0)
        await submit(cluster, "", 10).check()
        assert (cluster.engine.lanes[0].policy is not None) is is_adaptive, "a lane that comes anew has the same"


def adaptive_off() -> Cluster:
    return Cluster([VERIFIER], [drafter(acceptance=0.9)], k=4, min_draft_wait_ms=1000)


async def test_not_with_half_batches() -> None:
    async with Cluster([VERIFIER], [drafter()], k=4, half_batches_from=2) as cluster:
        await cluster.all_there()
        with pytest.raises(FailedPreconditionError, match="half_batches_from is 2"):
            cluster.engine.set_canary(START, 0.1, '{"enable_adaptive_verification": true}')


def two_methods() -> Cluster:
    """A base that knows nothing right, and a canary's drafter that knows everything."""
    return Cluster(drafters=[DrafterScript(method="ngram", acceptance=0.0), DrafterScript(method="suffix", acceptance=1.0)], k=4)


def rates(running: list[Running]) -> list[float]:
    stats = [each.sink.choices[0].spec_stats for each in running]
    return [spec.num_accepted_tokens / spec.num_draft_tokens for spec in stats if spec is not None]


async def test_each_has_the_drafters_of_its_method() -> None:
    async with two_methods() as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.3, '{"method": "suffix"}')
        running = [submit(cluster, variant, seed) for seed in range(4) for variant in (BASE, CANARY)]
        await asyncio.gather(*[each.check() for each in running])
        assert rates(running) == [0.0, 1.0] * 4
        base, canary = cluster.engine.variants.status()
        assert (json.loads(base.config)["method"], json.loads(canary.config)["method"]) == ("ngram", "suffix")
        assert (base.num_accepted_tokens, canary.acceptance_length) == (0, pytest.approx(5.0, abs=0.5))


@pytest.mark.parametrize(("action", "rate"), [(PROMOTE, 1.0), (ROLL_BACK, 0.0)])
async def test_a_methods_end_while_requests_run(action: CanaryAction, rate: float) -> None:
    async with two_methods() as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.5, '{"method": "suffix"}')
        running = [submit(cluster, variant, seed, 400) for seed, variant in enumerate((BASE, CANARY))]
        await cluster.until(lambda: all(len(each.sink.choices[0].token_ids) > 10 for each in running))
        cluster.engine.set_canary(action, 0.0, "")
        later = [submit(cluster, variant, seed) for seed, variant in enumerate(("", CANARY, BASE), start=2)]
        await asyncio.gather(*[each.check() for each in (*running, *later)])
        assert rates(later) == [rate] * 3
        assert all(0.0 < found < 1.0 for found in rates(running)[int(rate == 0.0) : 1 + int(rate == 0.0)]), "the one that changed had both"


async def test_shares_over_1000_requests_of_two_methods() -> None:
    async with Cluster(
        [VERIFIER], [drafter(method="ngram", acceptance=0.5), drafter(method="suffix", acceptance=0.9)], k=4, max_queue=2000, min_draft_wait_ms=1000
    ) as cluster:
        await cluster.all_there()
        cluster.engine.set_canary(START, 0.1, '{"method": "suffix", "enable_adaptive_verification": true}')
        for batch in range(10):
            await asyncio.gather(*[submit(cluster, "", seed, 4).check() for seed in range(100 * batch, 100 * batch + 100)])
        base, canary = cluster.engine.variants.status()
        assert base.num_ended + canary.num_ended == 1000
        assert abs(canary.num_ended / 1000 - 0.1) < 0.02
        assert base.num_generated_tokens == 4 * base.num_ended
        assert canary.num_generated_tokens == 4 * canary.num_ended


async def test_from_the_coordinators_start() -> None:
    """Its canary has a method and adaptive verification of its own before any drafter is there."""
    config = '{"method": "suffix", "enable_adaptive_verification": true}'
    drafters = [drafter(method="ngram", acceptance=0.0), drafter(method="suffix", acceptance=1.0)]
    async with Cluster([VERIFIER], drafters, k=4, min_draft_wait_ms=1000, canary_config=config, canary_share=0.0) as cluster:
        await cluster.all_there()
        assert cluster.engine.lanes[0].policy is not None
        running = [submit(cluster, variant, seed, 400) for seed in range(4) for variant in (BASE, CANARY)]
        await asyncio.gather(*[each.check() for each in running])
        assert rates(running) == [0.0, 1.0] * 4
        cluster.engine.set_canary(PROMOTE, 0.0, "")
        running = [submit(cluster, "", seed, 400) for seed in range(4)]
        await asyncio.gather(*[each.check() for each in running])
        assert rates(running) == [1.0] * 4
        assert {setting.key: setting.value for setting in cluster.engine.speculation}["method"] == "suffix"
    with pytest.raises(FailedPreconditionError, match="half_batches_from is 2"):
        await Cluster([VERIFIER], [drafter()], k=4, half_batches_from=2, canary_config=config).__aenter__()
