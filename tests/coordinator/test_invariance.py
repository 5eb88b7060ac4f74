"""The same tokens whatever drafts, schedules, faults and places a sequence meets."""

from collections.abc import Sequence

import pytest

from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import GARBAGE, DrafterScript
from tests.scripted.verifier import VerifierScript

PROMPTS = [list(range(3, 3 + length)) for length in (1, 4, 5, 17, 40, 90, 150, 260)]
MAX_TOKENS = 60


def submit_all(cluster: Cluster, prompts: Sequence[Sequence[int]] = PROMPTS, max_tokens: int = MAX_TOKENS) -> list[Running]:
    return [cluster.submit(prompt, seed=index, max_tokens=max_tokens + index) for index, prompt in enumerate(prompts)]


async def check_all(running: Sequence[Running]) -> None:
    for request in running:
        await request.check()


async def until_tokens(running: Sequence[Running], num_tokens: int) -> None:
    """Returns once so many tokens have arrived over all requests."""
    await running[0].cluster.until(lambda: sum(len(choice.token_ids) for request in running for choice in request.sink.choices) >= num_tokens)


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("w", [1, 2, 3])
async def test_no_drafter(w: int, grpc: bool) -> None:
    async with Cluster([VerifierScript(max_outstanding_rounds=3)], grpc=grpc, max_outstanding_rounds=w) as cluster:
        await check_all(submit_all(await cluster.ready()))
        assert cluster.engine.counters.num_draft_tokens == 0
        assert cluster.engine.counters.num_stale_rows == 0


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("w", [1, 2])
@pytest.mark.parametrize("acceptance", [1.0, 0.7, 0.0])
async def test_drafter(acceptance: float, w: int, grpc: bool) -> None:
    drafter = DrafterScript(acceptance=acceptance)
    async with Cluster(drafters=[drafter], grpc=grpc, max_outstanding_rounds=w, min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        counters = cluster.engine.counters
        assert counters.num_draft_tokens > 400
        assert counters.num_accepted_tokens >= acceptance * 200
        if acceptance == 1.0:
            assert counters.num_accepted_tokens == counters.num_draft_tokens
        assert counters.num_garbage_drafts == counters.num_stale_drafts == counters.num_drafter_timeouts == 0


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_drafter(kind: str) -> None:
    async with Cluster(drafters=[DrafterScript(garbage=(kind,))], grpc=kind == "nan", min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        counters = cluster.engine.counters
        dropped = {
            "wrong_tokens": counters.num_draft_tokens - counters.num_accepted_tokens,
            "wrong_epoch": counters.num_stale_drafts,
            "wrong_base_len": counters.num_stale_drafts,
            "unknown_slots": counters.num_stale_drafts,
            "doubled": counters.num_accepted_tokens,
            "no_rows": counters.num_rows,
            "nan": counters.num_nan_scores,
        }
        assert dropped.get(kind, counters.num_garbage_drafts) > 100
        if kind == "nan":
            assert counters.num_draft_tokens == counters.num_accepted_tokens > 100, "a draft without a score is a draft"
        elif kind not in ("doubled", "wrong_tokens"):
            assert counters.num_draft_tokens == 0
        assert counters.num_bad_rows == 0


async def test_all_kinds_of_garbage() -> None:
    async with Cluster(drafters=[DrafterScript(garbage=GARBAGE)], min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert cluster.engine.counters.num_garbage_drafts > 0


@pytest.mark.parametrize("grpc", [False, True])
async def test_slow_drafter(grpc: bool) -> None:
    """Every third reply comes too late; what is late is dropped, and the drafter catches up."""
    num_rounds = 0

    def delay_s(message: object) -> float:
        nonlocal num_rounds
        num_rounds += 1
        return 0.05 if num_rounds % 3 == 0 else 0.0

    async with Cluster(drafters=[DrafterScript(delay_s=delay_s)], grpc=grpc, min_draft_wait_ms=10) as cluster:
        cluster.verifiers[0].script.delay_s = 0.002
        await check_all(submit_all(await cluster.all_there(), max_tokens=100))
        counters = cluster.engine.counters
        assert counters.num_drafter_timeouts > 2
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 50


async def test_hung_drafter_gets_no_more_messages() -> None:
    async with Cluster(drafters=[DrafterScript(delay_s=3600)], min_draft_wait_ms=1) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        counters = cluster.engine.counters
        assert counters.num_drafter_timeouts <= 1
        assert counters.num_draft_tokens == 0


@pytest.mark.parametrize("grpc", [False, True])
async def test_drafter_dies_and_comes_back(grpc: bool) -> None:
    async with Cluster(drafters=[DrafterScript()], grpc=grpc, min_draft_wait_ms=1000) as cluster:
        cluster.verifiers[0].script.delay_s = 0.002
        running = submit_all(await cluster.all_there(), max_tokens=200)
        await until_tokens(running, 200)
        await cluster.kill_drafter(0)
        num_before = cluster.engine.counters.num_draft_tokens
        await until_tokens(running, 400)
        await cluster.restart_drafter(0)
        await cluster.all_there()
        await check_all(running)
        counters = cluster.engine.counters
        assert counters.num_drafter_losses == 1
        assert counters.num_accepted_tokens == counters.num_draft_tokens > num_before > 0


async def test_drafter_that_catches_up() -> None:
    async with Cluster(drafters=[DrafterScript(num_catch_up_rounds=7)], min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        counters = cluster.engine.counters
        assert counters.fallbacks["catching_up"] == 7 * len(PROMPTS)
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 100


async def test_drafter_that_catches_up_is_asked_with_ever_longer_breaks() -> None:
    async with Cluster(drafters=[DrafterScript(num_catch_up_rounds=6)], min_draft_wait_ms=1000) as cluster:
        running = (await cluster.all_there()).submit(PROMPTS[1], max_tokens=120, seed=3)
        await running.check()
        counters, stats = cluster.engine.counters, running.sink.choices[0].spec_stats
        assert counters.fallbacks["catching_up"] == 6
        assert stats is not None
        # Asked in the first round behind the prompt, then 1, 2, 4, 8, 8 and 8 rounds later.
        assert stats.num_steps - stats.num_drafts == 1 + sum((1, 2, 4, 8, 8, 8))


async def test_two_drafters() -> None:
    async with Cluster(drafters=[DrafterScript(), DrafterScript(acceptance=0.5, instance_id="other")], min_draft_wait_ms=1000) as cluster:
        running = submit_all(await cluster.all_there())
        await until_tokens(running, 100)
        num_open = [drafter.num_open for drafter in cluster.drafters]
        assert abs(num_open[0] - num_open[1]) <= 1
        await check_all(running)
        assert all(drafter.num_rounds > 10 for drafter in cluster.drafters)


async def test_one_of_two_drafters_dies() -> None:
    async with Cluster(drafters=[DrafterScript(), DrafterScript()], min_draft_wait_ms=1000) as cluster:
        running = submit_all(await cluster.all_there())
        await until_tokens(running, 100)
        await cluster.kill_drafter(0)
        await until_tokens(running, 200)
        assert cluster.drafters[1].num_open == sum(not request.sink.ended for request in running)
        await check_all(running)


@pytest.mark.parametrize("schedule", [[[1, 2, 5], [3, 16, 0]], [[1, 3, 0], [4, 16, 3]], [[1, 1, 2], [2, 3, 0], [4, 5, 5], [6, 16, 0]]])
@pytest.mark.parametrize("w", [1, 2])
async def test_schedule_crosses_zero(schedule: list[list[int]], w: int) -> None:
    async with Cluster(drafters=[DrafterScript()], schedule=schedule, max_outstanding_rounds=w, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        running = [cluster.submit(prompt, seed=index, max_tokens=10 + 25 * index) for index, prompt in enumerate(PROMPTS)]
        for index in range(6):
            await until_tokens(running, 150 * index)
            running.append(cluster.submit(PROMPTS[index], seed=100 + index, max_tokens=10 + 5 * index))
        await check_all(running)
        counters = cluster.engine.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 20
        assert counters.num_rows - counters.num_drafts > 60


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("num_drafters", [0, 1])
async def test_one_of_two_verifiers_dies(num_drafters: int, grpc: bool) -> None:
    drafters = [DrafterScript()] * num_drafters
    async with Cluster([VerifierScript(delay_s=0.001)] * 2, drafters, grpc=grpc, min_draft_wait_ms=1000) as cluster:
        running = submit_all(await cluster.all_there())
        await until_tokens(running, 100)
        assert all(lane.running for lane in cluster.engine.lanes)
        await cluster.kill_verifier(0)
        await check_all(running)
        assert cluster.engine.counters.num_verifier_losses == 1
        assert cluster.engine.ready.is_ready
        assert "lane 0" in cluster.engine.ready.reason


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("num_drafters", [0, 1])
async def test_only_verifier_restarts(num_drafters: int, grpc: bool) -> None:
    drafters = [DrafterScript(acceptance=0.6)] * num_drafters
    async with Cluster([VerifierScript(delay_s=0.001)], drafters, grpc=grpc, min_draft_wait_ms=1000) as cluster:
        running = submit_all(await cluster.all_there())
        for num_tokens in (100, 250):
            await until_tokens(running, num_tokens)
            await cluster.kill_verifier(0)
            while cluster.engine.ready.is_ready:
                await cluster.engine.readiness_changed()
            await cluster.restart_verifier(0)
        await check_all(running)
        assert cluster.engine.counters.num_verifier_losses == 2


@pytest.mark.parametrize("grpc", [False, True])
@pytest.mark.parametrize("num_drafters", [0, 1])
@pytest.mark.parametrize("w", [1, 2])
async def test_forced_preemption(w: int, num_drafters: int, grpc: bool) -> None:
    """Room for the longest sequence and a little more, though Describe promises enough for all."""
    drafters = [DrafterScript(acceptance=0.6)] * num_drafters
    script = VerifierScript(num_usable_blocks=90, prefix_caching=False)
    async with Cluster([script], drafters, grpc=grpc, max_outstanding_rounds=w, min_draft_wait_ms=1000) as cluster:
        running = submit_all(await cluster.all_there())
        await check_all(running)
        counters = cluster.engine.counters
        assert counters.num_preemptions > 0
        assert sum(request.sink.choices[0].spec_stats.num_preemptions for request in running) == counters.num_preemptions
        assert counters.num_bad_rows == 0
        if w == 1:
            assert counters.num_stale_rows == 0, "a row that found no blocks is sent again after the last one that ran"


async def test_answers_of_a_preempted_sequence_that_runs_elsewhere_are_dropped() -> None:
    """Lane 0 runs out of blocks with rows in flight; its sequence goes on at lane 1 before they are answered."""
    scripts = [VerifierScript(num_usable_blocks=60, delay_s=0.002, max_outstanding_rounds=3), VerifierScript()]
    async with Cluster(scripts, max_outstanding_rounds=3) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5] * (8 - seed), seed=seed, max_tokens=200) for seed in range(6)]
        await check_all(running)
        counters = cluster.engine.counters
        assert counters.num_preemptions > 0
        assert counters.num_dropped_rows > 0


async def test_lost_rows() -> None:
    """A verifier that now and then answers STALE without a reason."""
    num_rows = 0

    def lose_row(round_: int, row: object) -> bool:
        nonlocal num_rows
        num_rows += 1
        return num_rows % 41 == 0

    async with Cluster([VerifierScript(lose_row=lose_row)], [DrafterScript(acceptance=0.5)], min_draft_wait_ms=1000) as cluster:
        await check_all(submit_all(await cluster.all_there()))
        assert cluster.engine.counters.num_stale_rows > 5


async def test_batch_equals_one_by_one() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.6)], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        for index, prompt in enumerate(PROMPTS):
            await cluster.submit(prompt, seed=index, max_tokens=MAX_TOKENS).check()


async def test_choices_differ_and_repeat() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.6)], min_draft_wait_ms=1000) as cluster:
        request = (await cluster.all_there()).submit(PROMPTS[3], seed=0, n=4, max_tokens=30)
        await request.check()
        assert len({tuple(choice.token_ids) for choice in request.sink.choices}) == 4


async def test_without_a_seed_every_request_differs() -> None:
    async with Cluster() as cluster:
        await cluster.ready()
        running = [cluster.submit(PROMPTS[2], max_tokens=20) for _ in range(4)]
        results = [tuple((await request.sink.wait()).choices[0].token_ids) for request in running]
        assert len({*results}) == 4


async def test_a_late_answer_costs_few_steps() -> None:
    """No round runs ahead of the drafter's answer, so that its sequences, which stay with it, are drafted for in the step behind that in which it
    comes: here the one after the step that missed it."""
    num_rounds = 0

    def delay_s(message: object) -> float:
        nonlocal num_rounds
        num_rounds += 1
        return 0.25 if num_rounds in (3, 6) else 0.0

    verifiers, drafters = [VerifierScript(delay_s=0.15)], [DrafterScript(delay_s=delay_s)]
    async with Cluster(verifiers, drafters, k=5, max_outstanding_rounds=2, min_draft_wait_ms=20) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5, 6, 7 + seed], seed=seed, max_tokens=50) for seed in range(3)]
        await check_all(running)
        counters, link = cluster.engine.counters, cluster.engine.lanes[0].links[0]
        assert counters.num_drafter_timeouts == 2
        assert counters.fallbacks["no_drafter"] <= 3 * len(running), "4 times with rounds that run ahead, 2 if all is in time"
        assert max(link.epochs) == 1, "no sequence is opened anew"
        assert not link.is_awaited
