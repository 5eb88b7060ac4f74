"""When and what the balancer moves."""

import pytest

from coordinator import balance
from coordinator.balance import Balancer
from coordinator.link import DraftLink
from coordinator.pins import Pins
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_faults")


@pytest.mark.parametrize(("loads", "num_looks", "expected"), [
    ([24, 0, 0], 1, False),
    ([24, 0, 0], 2, True),
    ([10, 7], 9, False),
    ([1, 0], 9, False),
    ([2, 0], 2, True),
    ([5], 9, False),
    ([], 9, False),
])  # fmt: skip
def test_when_moving_begins(loads: list[int], num_looks: int, expected: bool) -> None:
    watch = balance._Watch()
    assert [watch.is_uneven(loads) for _ in range(num_looks)][-1] is expected


def test_moving_goes_on_to_the_mean_and_then_rests() -> None:
    watch = balance._Watch()
    looks = [watch.is_uneven(loads) for loads in ([9, 0], [9, 0], [6, 3], [5, 4], [6, 3], [6, 3], [6, 3])]
    assert looks == [False, True, True, False, False, False, False]


async def test_a_short_unevenness_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_INTERVAL_S", 3600)
    async with Cluster([VerifierScript(max_num_seqs=32, delay_s=0.002)] * 2) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5], seed=seed, max_tokens=50 if seed % 2 else 400) for seed in range(8)]
        first, second = cluster.engine.lanes
        await cluster.until(lambda: len(first.running) == len(second.running) == 4)
        await cluster.until(lambda: len(second.running) == 0)
        assert len(first.running) == 4
        balancer = Balancer(cluster.engine._admission)
        balancer.look()
        running += [cluster.submit([5], seed=seed, max_tokens=50) for seed in range(2)]
        await cluster.until(lambda: len(second.running) == 2)
        balancer.look()
        balancer.look()
        assert not first.leaving
        for request in running:
            await request.check()
        assert cluster.engine.counters.num_moves == 0


async def test_what_moves_is_bounded_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest sequences go first, as many tokens as two rounds have; those with a setback stay."""
    monkeypatch.setattr(balance, "_INTERVAL_S", 3600)
    script = VerifierScript(max_num_seqs=32, max_num_batched_tokens=50, max_model_len=512, delay_s=0.01)
    async with Cluster([script] * 2, max_outstanding_rounds=1) as cluster:
        await cluster.all_there()
        await cluster.kill_verifier(1)
        await until(lambda: not cluster.engine.lanes[1].is_ready)
        lengths = (90, 10, 80, 20, 70, 30, 60, 40)
        running = [cluster.submit([5] * length, seed=length, max_tokens=100) for length in lengths]
        first, second = cluster.engine.lanes
        await cluster.until(lambda: all(request.sink.choices[0].token_ids for request in running))
        await cluster.restart_verifier(1)
        await until(lambda: second.is_ready)
        by_length = {len(sequence.token_ids): sequence for sequence in first.running}
        shortest = [by_length[length] for length in sorted(by_length)]
        shortest[0].num_setbacks = 1
        balancer = Balancer(cluster.engine._admission)
        balancer.look()
        assert not first.leaving
        balancer.look()
        leaving = list(first.leaving)
        assert leaving == shortest[1 : 1 + len(leaving)]
        assert 1 <= len(leaving) < 4
        assert sum(len(sequence.token_ids) for sequence in leaving) <= 100
        balancer.look()
        assert list(first.leaving) == leaving  # one after the other
        while len(second.running) < 4:
            await cluster.until(lambda: not first.leaving)
            balancer.look()
        for _ in range(3):
            balancer.look()
        assert not first.leaving
        assert (len(first.running), len(second.running)) == (4, 4)
        shortest[0].num_setbacks = 0
        for request in running:
            await request.check()
        assert cluster.engine.counters.num_moves == 4


async def test_nothing_moves_to_a_drafter_that_hangs_for_another_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_INTERVAL_S", 3600)
    hangs = [False]
    drafters = [
        DrafterScript(max_model_len=4000),
        DrafterScript(delay_s=lambda message: 30.0 if hangs[0] and message.rows else 0.0, max_model_len=4000),
    ]
    async with Cluster([VerifierScript(max_model_len=4000, num_blocks=20_000, delay_s=0.002)] * 2, drafters) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5, 6, 7 + seed], seed=seed, max_tokens=3900) for seed in range(12)]
        first, second = cluster.engine.lanes
        await cluster.until(lambda: [len(link.slots) for lane in (first, second) for link in lane.links] == [6, 0, 0, 6])
        hangs[0] = True
        await cluster.until(lambda: [len(link.slots) for lane in (first, second) for link in lane.links] == [6, 0, 6, 0])
        assert first.links[1].is_usable, "the lane that has not asked it does not know"
        balancer = Balancer(cluster.engine._admission)
        for _ in range(5):
            balancer.look()
        assert cluster.engine.counters.num_drafter_moves == 0
        for request in running:
            request.handle.cancel()


async def test_a_look_at_an_even_fleet_asks_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody steps meanwhile: for each drafter one sequence that it could take is enough, however many lanes and sequences there are."""
    monkeypatch.setattr(balance, "_INTERVAL_S", 3600)
    async with Cluster([VerifierScript(delay_s=0.002)] * 6, [DrafterScript()] * 6, min_draft_wait_ms=5000) as cluster:
        await cluster.all_there()
        running = [cluster.submit([5], seed=seed, max_tokens=200) for seed in range(24)]
        await cluster.until(lambda: all(len(lane.running) == 4 and not lane.pins.looking for lane in cluster.engine.lanes))
        asked: list[DraftLink] = []
        can_take = DraftLink.can_take
        monkeypatch.setattr(DraftLink, "can_take", lambda link, sequence: asked.append(link) or can_take(link, sequence))
        monkeypatch.setattr(Pins, "shares", lambda pins: pytest.fail("nothing is to be moved"))
        Balancer(cluster.engine._admission).look()
        monkeypatch.undo()
        assert len(asked) == 5
        for request in running:
            await request.check()
