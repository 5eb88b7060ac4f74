"""The predicted time of a drafter's reply."""

import pytest

from coordinator.reply_times import ReplyTimes
from specwire.messages import DraftCost
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

COSTS = (DraftCost(1, 1, 2.0), DraftCost(5, 1, 6.0), DraftCost(1, 8, 4.0), DraftCost(5, 8, 12.0))


@pytest.mark.parametrize(
    ("k", "num_sequences", "seconds"),
    [(1, 1, 0.002), (2, 1, 0.006), (5, 1, 0.006), (1, 2, 0.004), (3, 5, 0.012), (5, 8, 0.012), (7, 1, 0.012), (1, 100, 0.15)],
)
def test_seed_is_the_next_larger_measurement(k: int, num_sequences: int, seconds: float) -> None:
    assert ReplyTimes(COSTS).predict(k, num_sequences) == seconds


def test_without_measurements_nothing_is_predicted() -> None:
    assert ReplyTimes().predict(5, 1) == 0.0


def test_replies_take_over_from_the_seed() -> None:
    times = ReplyTimes(COSTS)
    for _ in range(40):
        times.record(5, 1, 0.001, 1.0)
    assert times.predict(5, 1) == 0.001
    assert times.predict(1, 1) == 0.002, "another K keeps its seed"
    assert times.predict(5, 8) == 0.012, "another number of sequences, too"


def test_sizes_share_a_bucket_up_to_the_next_power_of_two() -> None:
    times = ReplyTimes()
    times.record(3, 4, 0.5, 1.0)
    assert times.predict(3, 7) == 0.5
    assert times.predict(3, 8) == 0.0


def test_one_slow_reply_of_many_counts_little() -> None:
    times = ReplyTimes()
    for _ in range(31):
        times.record(5, 1, 0.001, 1.0)
    times.record(5, 1, 0.9, 1.0)
    assert times.predict(5, 1) == 0.001


def test_a_hung_reply_counts_as_twice_its_wait_at_most() -> None:
    """A drafter that needs longer than the least wait is believed step by step: 5 ms, 10 ms, then 3 x 10 ms, ..."""
    times, wait_s = ReplyTimes(), 0.005
    waits = []
    for _ in range(4):
        times.record(5, 1, 60.0, 2 * wait_s)
        wait_s = max(0.005, 3 * times.predict(5, 1))
        waits.append(wait_s)
    assert waits[0] == pytest.approx(0.03)
    assert all(wait <= 6 * before for wait, before in zip(waits[1:], waits, strict=False))


@pytest.mark.parametrize(("chunk_ms", "seconds"), [(0.0, 0.018), (7.0, 0.025)])
async def test_background_work_at_the_drafter_is_waited_for(chunk_ms: float, seconds: float) -> None:
    async with Cluster(drafters=[DrafterScript(draft_cost=COSTS, draft_chunk_ms=chunk_ms)], min_draft_wait_ms=5) as cluster:
        await cluster.all_there()
        assert cluster.engine.lanes[0].links[0].drafter.wait_s(5, 1) == pytest.approx(seconds)


async def test_a_drafter_that_hangs_each_time_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that grows with every late answer ends as long as the answers are late: each step would take that long."""
    monkeypatch.setattr("coordinator.asked_round.HUNG_S", 0.02)
    async with Cluster([VerifierScript(delay_s=0.005)], [DrafterScript(delay_s=0.1)], min_draft_wait_ms=5) as cluster:
        await cluster.all_there()
        cluster.submit([5, 6, 7], seed=1, max_tokens=500)
        await cluster.until(lambda: cluster.engine.counters.num_drafter_timeouts >= 5)
        assert cluster.engine.lanes[0].links[0].drafter.wait_s(5, 1) == 0.005
