"""More important requests go first, also before what runs; who gives way goes on exactly."""

import asyncio
import dataclasses
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.lane import Lane
from coordinator.plan import Plan, make_plan
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript


def num_preempted(request: Running) -> int:
    stats = request.sink.choices[0].spec_stats
    assert stats is not None
    return stats.num_preemptions


async def has_begun(cluster: Cluster, *requests: Running) -> None:
    await cluster.until(lambda: all(choice.token_ids for request in requests for choice in request.sink.choices))


async def test_a_more_important_request_takes_a_slot() -> None:
    """The newest of the least important gives way; what it gave is not given again."""
    async with Cluster([VerifierScript(max_num_seqs=3)], [DrafterScript()]) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5 + i], seed=i, max_tokens=300, priority=priority) for i, priority in enumerate((1, 2, 2))]
        await has_begun(cluster, *running)
        important = cluster.submit([9], seed=9, max_tokens=20, priority=0)
        await important.check()
        assert not any(request.sink.ended for request in running)
        for request in running:
            await request.check()
        assert [num_preempted(request) for request in running] == [0, 0, 1]
        assert cluster.engine.counters.num_preemptions == 1


async def test_equals_wait() -> None:
    async with Cluster([VerifierScript(max_num_seqs=2)]) as cluster:
        await cluster.ready()
        running = [cluster.submit([5 + i], seed=i, max_tokens=40, priority=1) for i in range(2)]
        await has_begun(cluster, *running)
        later = [cluster.submit([7 + i], seed=7, max_tokens=5, priority=priority) for i, priority in enumerate((1, 2))]
        for request in (*running, *later):
            await request.check()
            assert num_preempted(request) == 0


async def test_a_more_important_request_takes_blocks() -> None:
    """As many places as it needs and no more, though slots are free."""
    async with Cluster([VerifierScript(num_blocks=48, block_size=4, max_model_len=160, prefix_caching=False)]) as cluster:
        await cluster.ready()
        running = [cluster.submit([5 + i] * 36, seed=i, max_tokens=12, priority=1) for i in range(3)]
        await has_begun(cluster, *running)
        important = cluster.submit([9] * 76, seed=9, max_tokens=10)
        await important.check()
        for request in running:
            await request.check()
        assert [num_preempted(request) for request in running] == [0, 0, 1]


async def test_none_gives_way_where_all_would_not_be_enough() -> None:
    async with Cluster([VerifierScript(num_blocks=40, block_size=4, max_model_len=160, prefix_caching=False)]) as cluster:
        await cluster.ready()
        large = cluster.submit([5] * 70, seed=0, max_tokens=40, priority=0)
        small = cluster.submit([6] * 5, seed=1, max_tokens=40, priority=1)
        await has_begun(cluster, large, small)
        important = cluster.submit([9] * 110, seed=9, max_tokens=10, priority=0)
        await cluster.until(lambda: large.sink.ended)
        assert not important.sink.choices[0].token_ids
        for request in (large, small, important):
            await request.check()
            assert num_preempted(request) == 0


async def test_all_choices_of_a_request_give_way() -> None:
    async with Cluster([VerifierScript(max_num_seqs=4)]) as cluster:
        await cluster.ready()
        running = cluster.submit([5, 6], seed=1, max_tokens=200, n=4, priority=1)
        await has_begun(cluster, running)
        important = cluster.submit([7, 8], seed=2, max_tokens=30, n=4)
        await important.check()
        assert not running.sink.ended
        await running.check()
        assert cluster.engine.counters.num_preemptions == 4


async def test_who_is_not_read_gives_way_first() -> None:
    """Before a less important one whose client reads, which then need not."""
    async with Cluster([VerifierScript(max_num_seqs=2)], max_stream_backlog=8) as cluster:
        await cluster.ready()
        unread = CollectingSink(holds=True, on_tokens=cluster.advance)
        paused = cluster.submit([5], unread, seed=0, max_tokens=60, priority=0)
        read = cluster.submit([6], seed=1, max_tokens=300, priority=1)
        await cluster.until(lambda: unread.num_unread > 8 and bool(read.sink.choices[0].token_ids))
        important = cluster.submit([7], seed=2, max_tokens=10, priority=0)
        await important.check()
        assert (cluster.engine.counters.num_pauses, cluster.engine.counters.num_preemptions) == (1, 0)
        unread.stop_holding()
        for request in (paused, read):
            await request.check()


@pytest.mark.parametrize("num_lanes", [1, 3])
async def test_a_stream_of_important_requests_beside_drafters_that_are_slow(num_lanes: int) -> None:
    """Lanes are in the middle of a step when others preempt."""
    drafters = [DrafterScript(acceptance=0.6, delay_s=0.001)]
    async with Cluster([VerifierScript(max_num_seqs=2)] * num_lanes, drafters, k=3, min_draft_wait_ms=20) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5 + i], seed=i, max_tokens=120, priority=2) for i in range(2 * num_lanes)]
        await has_begun(cluster, *running)
        important = [cluster.submit([50 + i] * 3, seed=i, max_tokens=4, priority=i % 2) for i in range(12)]
        for request in (*important, *running):
            await request.check()
        assert cluster.engine.counters.num_preemptions >= 2 * num_lanes


async def test_a_lane_that_waits_for_drafts_keeps_its_sequences() -> None:
    """Another lane, which steps meanwhile, preempts none of them: the plan names them, and each could have another slot by the time of the round."""
    script = VerifierScript(max_num_seqs=1)
    async with Cluster([script] * 2, [DrafterScript(delay_s=0.05)], k=5, min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        drafted = cluster.submit([5, 6], seed=0, max_tokens=30, priority=1)
        await cluster.until(lambda: cluster.drafters[0].num_rounds > 0)
        plain = cluster.submit([7, 8], seed=1, max_tokens=20, max_draft_tokens=0)
        await has_begun(cluster, plain)
        waiting = [cluster.submit([9, 10 + i], seed=2 + i, max_tokens=5, max_draft_tokens=0) for i in range(3)]
        for request in (*waiting, plain, drafted):
            await request.check()


@dataclasses.dataclass(frozen=True)
class Arrival:
    num_steps: int
    num_prompt: int
    max_tokens: int
    priority: int


arrivals = st.builds(Arrival, st.integers(0, 5), st.integers(1, 60), st.integers(1, 40), st.integers(-1, 2))


@settings(max_examples=25)
@given(st.lists(arrivals, min_size=2, max_size=14))
def test_nobody_runs_while_a_more_important_one_waits(requests: list[Arrival]) -> None:
    """Wherever only slots are short. All end, and with their own tokens."""
    asyncio.run(_serve(requests))


async def _serve(requests: list[Arrival]) -> None:
    num_plans = 0

    def checked_plan(lane: Lane) -> Plan | None:
        nonlocal num_plans
        plan = make_plan(lane)
        if plan is not None:
            num_plans += 1
            waiting, running = lane.admission.waiting, list(lane.running)
            least = max((sequence.order[0] for sequence in running), default=0)
            assert all(sequence.order[0] >= least for sequence in waiting), f"{waiting} wait while {running} run"
            assert not waiting or len(running) == 3
        return plan

    async with Cluster([VerifierScript(max_num_seqs=3)]) as cluster:
        await cluster.ready()
        with mock.patch("coordinator.loop.make_plan", checked_plan):
            running: list[Running] = []
            for index, arrival in enumerate(requests):
                due = cluster.num_steps + arrival.num_steps
                await cluster.until(lambda due=due: cluster.num_steps >= due or all(request.sink.ended for request in running))  # type: ignore[misc]
                running.append(cluster.submit([3 + index] * arrival.num_prompt, seed=index, max_tokens=arrival.max_tokens, priority=arrival.priority))
            for request in running:
                await request.check()
        assert num_plans > 0
