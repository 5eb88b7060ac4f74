"""Half batches: one is drafted for while the other is verified, with the same tokens as without."""

import asyncio
import itertools
from typing import Any

import pytest

from specwire.config import CoordinatorConfig
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftRound, VerifyRound
from specwire.speculative_config import SpeculativeConfig
from tests.coordinator.test_invariance import check_all, submit_all
from tests.coordinator.test_random_steps import SCHEDULE, Storm, check
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

PROMPT = [5, 6, 7, 8, 9]


def halving(*, k: int = 3, verify_s: float = 0.0, **fields: Any) -> Cluster:
    """A lane that halves from two sequences on."""
    drafters = fields.pop("drafters", [DrafterScript()])
    return Cluster([VerifierScript(delay_s=verify_s)], drafters, k=k, **{"half_batches_from": 2, "min_draft_wait_ms": 1000} | fields)


def drafted_rounds(cluster: Cluster) -> list[VerifyRound]:
    return [message for message in cluster.verifiers[0].received if any(row.draft_tokens for row in message.rows)]


async def decode_side_by_side(cluster: Cluster, count: int, num_tokens: int) -> list[VerifyRound]:
    """The rounds with drafts while so many sequences decode."""
    await cluster.all_there()
    requests = [cluster.submit(PROMPT, seed=seed, max_tokens=num_tokens + 60) for seed in range(count)]
    await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 20 for request in requests))
    cluster.verifiers[0].received.clear()
    await cluster.until(lambda: any(len(request.sink.choices[0].token_ids) > num_tokens for request in requests))
    rounds = drafted_rounds(cluster)
    await check_all(requests)
    return rounds


@pytest.mark.parametrize("count", [2, 5, 8])
async def test_steps_take_halves_in_turn(count: int) -> None:
    async with halving() as cluster:
        rounds = await decode_side_by_side(cluster, count, 80)
        assert len(rounds) > 10
        halves = [{row.slot for row in message.rows} for message in rounds]
        for one, other in itertools.pairwise(halves):
            assert not one & other, "a sequence has one row with drafts in flight"
            assert len(one | other) == count
            assert abs(len(one) - len(other)) <= 1
        assert cluster.engine.counters.num_accepted_tokens > 100
        assert cluster.engine.counters.num_stale_rows == 0


async def test_fewer_sequences_go_in_lockstep() -> None:
    async with halving(half_batches_from=4) as cluster:
        rounds = await decode_side_by_side(cluster, 3, 80)
        assert {len(message.rows) for message in rounds} == {3}


@pytest.mark.parametrize(("half_batches_from", "num_verified"), [(0, 0), (2, 1)])
async def test_drafts_are_made_while_the_other_half_is_verified(half_batches_from: int, num_verified: int) -> None:
    """Rounds that are being verified when drafts are asked for: none, or the other half."""
    async with halving(half_batches_from=half_batches_from, verify_s=0.001) as cluster:
        seen: list[int] = []

        def note(message: DraftRound) -> float:
            if message.rows:
                seen.append(len(cluster.engine.lanes[0].in_flight))
            return 0.0

        cluster.drafters[0].script.delay_s = note
        await decode_side_by_side(cluster, 4, 60)
        assert len(seen) > 20
        assert seen.count(num_verified) > 0.8 * len(seen)


async def test_k_is_that_of_all_sequences() -> None:
    async with halving(k=5, schedule=[[1, 3, 5], [4, 16, 2]]) as cluster:
        rounds = await decode_side_by_side(cluster, 6, 80)
        assert {len(message.rows) for message in rounds} == {3}
        assert max(len(row.draft_tokens) for message in rounds for row in message.rows) == 2


async def test_spells_without_drafts_run_ahead_with_all_sequences() -> None:
    """K is 0 for four and more sequences: they share a round, and rows follow tokens in flight. Then K is 2 for those that are left."""
    async with halving(schedule=[[1, 3, 2], [4, 16, 0]]) as cluster:
        await cluster.all_there()
        short = [cluster.submit(PROMPT, seed=seed, max_tokens=60) for seed in range(2)]
        long = [cluster.submit(PROMPT, seed=seed, max_tokens=200) for seed in range(2, 5)]
        await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 20 for request in short + long))
        rounds = cluster.verifiers[0].received
        assert len(rounds[-1].rows) == 5
        assert any(row.from_round for row in rounds[-1].rows)
        await check_all(short + long)
        assert {len(message.rows) for message in drafted_rounds(cluster)} >= {1, 2}


async def test_prompts_are_computed_beside_halves() -> None:
    async with halving() as cluster:
        await cluster.all_there()
        requests = [cluster.submit(PROMPT, seed=seed, max_tokens=200) for seed in range(4)]
        await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 10 for request in requests))
        late = cluster.submit([7] * 400, seed=9, max_tokens=5)
        await late.check()
        await check_all(requests)
        mixed = [message for message in drafted_rounds(cluster) if any(row.token_budget for row in message.rows)]
        assert mixed, "chunks share rounds with decodes"


async def test_sequences_without_drafts_do_not_keep_others_waiting() -> None:
    """Two requests want no drafts: all get on, and the others are drafted for."""
    async with halving() as cluster:
        await cluster.all_there()
        plain = [cluster.submit(PROMPT, seed=seed, max_tokens=60, max_draft_tokens=0) for seed in range(2)]
        drafted = [cluster.submit(PROMPT, seed=seed, max_tokens=60) for seed in range(2, 4)]
        await check_all(plain + drafted)
        for request in drafted:
            stats = request.sink.choices[0].spec_stats
            assert stats is not None
            assert stats.num_draft_tokens > 30


@pytest.mark.parametrize("w", [2, 3])
@pytest.mark.parametrize("acceptance", [1.0, 0.6])
async def test_the_tokens_are_the_targets(acceptance: float, w: int) -> None:
    drafters = [DrafterScript(acceptance=acceptance), DrafterScript(acceptance=acceptance, num_catch_up_rounds=2)]
    script = VerifierScript(max_outstanding_rounds=3)
    async with Cluster([script], drafters, half_batches_from=3, max_outstanding_rounds=w, min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        counters = cluster.engine.counters
        assert counters.num_accepted_tokens > 200
        assert counters.num_stale_rows == counters.num_bad_rows == counters.num_drafter_timeouts == 0


async def test_a_drafter_that_goes_and_comes_back() -> None:
    async with halving(verify_s=0.002) as cluster:
        await cluster.all_there()
        requests = [cluster.submit(PROMPT, seed=seed, max_tokens=300) for seed in range(5)]
        await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 20 for request in requests))
        await cluster.kill_drafter(0)
        await cluster.until(lambda: len(cluster.verifiers[0].received[-1].rows) == 5)
        await cluster.restart_drafter(0)
        cluster.verifiers[0].received.clear()
        await cluster.until(lambda: {len(message.rows) for message in drafted_rounds(cluster)} >= {2, 3})
        await check_all(requests)


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_steps(seed: int) -> None:
    """The storm of test_random_steps over lanes that halve."""
    script = VerifierScript(max_outstanding_rounds=3)
    drafters = [DrafterScript(), DrafterScript(acceptance=0.5, max_model_len=100, max_num_seqs=6, max_num_draft_tokens=3)]
    async with Cluster(
        [script] * 2, drafters, k=4, schedule=SCHEDULE, half_batches_from=1 + seed, max_outstanding_rounds=1 + seed, min_draft_wait_ms=2,
        max_queue=16, max_stream_backlog=16,
    ) as cluster:  # fmt: skip
        await cluster.all_there()
        storm = Storm(cluster, seed)
        while cluster.num_steps < 1000:
            await storm.act()
            storm.live = [request for request in storm.live if not request.sink.ended]
            num_steps = cluster.num_steps
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await cluster.until(lambda num_steps=num_steps: cluster.num_steps > num_steps or not storm.is_moving)  # type: ignore[misc]
        await storm.heal()
        for request in storm.requests:
            await check(request)
        assert cluster.engine.counters.num_accepted_tokens > 0
        assert cluster.engine.counters.num_bad_rows == 0


async def test_a_verifier_of_one_round_has_no_halves(caplog: pytest.LogCaptureFixture) -> None:
    async with Cluster([VerifierScript(max_outstanding_rounds=1)], [DrafterScript()], half_batches_from=2, min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert "lane 0: its verifier takes one round at a time, so there are no half batches" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_outstanding_rounds": 1}, "--half-batches-from is 4, but --max-outstanding-rounds is 1"),
        ({"speculative_config": SpeculativeConfig(num_speculative_tokens=2, enable_adaptive_verification=True)}, "adaptive verification"),
    ],
)
def test_settings_that_exclude_half_batches(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        CoordinatorConfig(half_batches_from=4, **fields)
