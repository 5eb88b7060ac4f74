"""Which drafters a lane asks: as few as can be, evenly, and its own ones where there are some."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from coordinator import balance
from coordinator.pins import overlap
from specwire.messages import DraftRound, VerifyRound
from tests.bench.virtual_time import VirtualLoop
from tests.coordinator.test_invariance import check_all
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

K = 3
_VERIFY_MS, _DRAFT_MS, _VERIFY_HOP_MS, _DRAFT_HOP_MS = 5.4, 3.6, 1.0, 1.3
"""About what eight sequences take with llama-8b and llama-1b on an H200 (docs/performance.md, Placement)."""


def pinned(cluster: Cluster) -> list[list[int]]:
    """Sequences by lane and drafter."""
    return [[len(link.slots) for link in lane.links] for lane in cluster.engine.lanes]


async def submit_at_once(cluster: Cluster, count: int) -> list[Running]:
    """Requests that all decode."""
    requests = [cluster.submit([5, 6, 7, 8 + index], seed=index, max_tokens=200) for index in range(count)]
    await cluster.until(lambda: all(len(request.sink.choices[0].token_ids) > 10 for request in requests))
    return requests


@pytest.mark.parametrize(
    ("num_lanes", "num_drafters", "expected"),
    [
        (1, 1, [[1]]),
        (1, 3, [[1, 1, 1]]),
        (3, 1, [[1], [1], [1]]),
        (2, 2, [[2, 0], [0, 2]]),
        (3, 2, [[2, 0], [1, 1], [0, 2]]),
        (2, 3, [[2, 1, 0], [0, 1, 2]]),
        (2, 4, [[2, 2, 0, 0], [0, 0, 2, 2]]),
    ],
)  # fmt: skip
def test_lanes_and_drafters_have_even_shares_of_each_other(num_lanes: int, num_drafters: int, expected: list[list[int]]) -> None:
    assert [[overlap(lane, num_lanes, drafter, num_drafters) for drafter in range(num_drafters)] for lane in range(num_lanes)] == expected


@pytest.mark.parametrize(
    ("num_lanes", "num_drafters", "expected"),
    [
        (1, 2, [[6, 6]]),
        (2, 2, [[6, 0], [0, 6]]),
        (3, 2, [[4, 0], [2, 2], [0, 4]]),
        (2, 3, [[4, 2, 0], [0, 2, 4]]),
    ],
)  # fmt: skip
async def test_a_burst_goes_to_each_lanes_own_drafters(num_lanes: int, num_drafters: int, expected: list[list[int]]) -> None:
    async with Cluster([VerifierScript()] * num_lanes, [DrafterScript()] * num_drafters, k=K, min_draft_wait_ms=1000) as cluster:
        requests = await submit_at_once(await cluster.all_there(), 12)
        assert pinned(cluster) == expected
        await check_all(requests)
        assert cluster.engine.counters.num_accepted_tokens > 100


async def test_a_full_drafter_leaves_the_rest_to_others() -> None:
    async with Cluster([VerifierScript()] * 2, [DrafterScript(max_num_seqs=2), DrafterScript()], k=K, min_draft_wait_ms=1000) as cluster:
        requests = await submit_at_once(await cluster.all_there(), 12)
        assert pinned(cluster) == [[2, 4], [0, 6]]
        await check_all(requests)


async def test_a_drafter_that_comes_back_gets_its_lanes_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_INTERVAL_S", 0.01)
    async with Cluster(
        [VerifierScript(max_model_len=4000, delay_s=0.001)] * 2, [DrafterScript(max_model_len=4000)] * 2, k=K, min_draft_wait_ms=1000
    ) as cluster:
        await cluster.all_there()
        requests = [cluster.submit([5, 6, 7, 8 + index], seed=index, max_tokens=3000) for index in range(12)]
        await cluster.until(lambda: pinned(cluster) == [[6, 0], [0, 6]])
        await cluster.kill_drafter(1)
        await cluster.until(lambda: pinned(cluster) == [[6, 0], [6, 0]])
        await cluster.restart_drafter(1)
        await cluster.until(lambda: pinned(cluster) == [[6, 0], [0, 6]])
        assert cluster.engine.counters.num_drafter_moves == 6
        for request in requests:
            request.handle.cancel()


async def test_sequences_of_a_drafter_that_hangs_go_to_one_that_comes_later() -> None:
    hangs = [False]
    drafters = [
        DrafterScript(delay_s=lambda message: 60.0 if hangs[0] and message.rows else 0.0, max_model_len=4000),
        DrafterScript(max_model_len=4000),
    ]
    async with Cluster([VerifierScript(max_model_len=4000, delay_s=0.001)], drafters, k=K, absent=["d1"]) as cluster:
        await cluster.ready()
        requests = [cluster.submit([5, 6, 7, 8 + index], seed=index, max_tokens=3900) for index in range(4)]
        await cluster.until(lambda: pinned(cluster) == [[4, 0]] and cluster.engine.counters.num_accepted_tokens > 0)
        hanging = cluster.engine.lanes[0].links[0]
        hangs[0] = True
        await cluster.until(lambda: hanging.is_late and not hanging.is_awaited)
        assert pinned(cluster) == [[4, 0]], "there is no other"
        await cluster.restart_drafter(1)
        await cluster.until(lambda: pinned(cluster) == [[0, 4]])
        assert hanging.is_late, "it was not lost yet"
        for request in requests:
            request.handle.cancel()


class Gpu:
    """Does one thing after the other, in virtual time."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def work(self, ms: float, hop_ms: float) -> Callable[[VerifyRound | DraftRound], float]:
        """What a round with rows takes until its answer is there, hops included."""

        def until_answered_s(message: VerifyRound | DraftRound) -> float:
            if not message.rows:
                return 0.0
            now_s = asyncio.get_running_loop().time()
            self._free_s = max(now_s, self._free_s) + ms / 1000
            return self._free_s - now_s + hop_ms / 1000

        return until_answered_s


def tokens_a_second(num_lanes: int) -> float:
    """Of eight sequences a lane, whose verifier has a GPU that one of the drafters has, too."""

    async def run() -> float:
        gpus = [Gpu() for _ in range(num_lanes)]
        verifiers = [VerifierScript(delay_s=gpu.work(_VERIFY_MS, _VERIFY_HOP_MS)) for gpu in gpus]
        drafters = [DrafterScript(delay_s=gpu.work(_DRAFT_MS, _DRAFT_HOP_MS)) for gpu in gpus]
        async with Cluster(verifiers, drafters, k=K, min_draft_wait_ms=10_000, verifier_timeout_s=0) as cluster:
            requests = await submit_at_once(await cluster.all_there(), 8 * num_lanes)

            def count() -> int:
                return sum(len(request.sink.choices[0].token_ids) for request in requests)

            started_s, before = asyncio.get_running_loop().time(), count()
            await cluster.until(lambda: count() > before + 100 * len(requests))
            rate = (count() - before) / (asyncio.get_running_loop().time() - started_s)
            await check_all(requests)
            return rate

    loop: Any = VirtualLoop()  # not asyncio.run, which would wait for threads at the end
    try:
        return float(loop.run_until_complete(run()))
    finally:
        loop.close()


def test_two_lanes_do_twice_the_work_of_one() -> None:
    assert tokens_a_second(2) >= 1.9 * tokens_a_second(1)
