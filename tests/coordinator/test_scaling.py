"""More and fewer replicas under load: everyone gets a fair share, and no token is lost or repeated."""

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from coordinator import balance
from coordinator.balance import Balancer
from specwire.messages import FinishReason
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_faults")

FAIR_SHARE = 0.6
NUM_SEQS = 24
VERIFIER = VerifierScript(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096, num_blocks=32_768, delay_s=0.002)
DRAFTER = DrafterScript(max_model_len=4096, acceptance=0.7, delay_s=0.0005)
FAST = {"discovery_interval_s": 0.05, "min_draft_wait_ms": 1000.0}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_INTERVAL_S", 0.03)


class Load:
    """A steady number of sequences: each one that ends is checked and followed by another."""

    def __init__(self, cluster: Cluster, num_seqs: int = NUM_SEQS, max_tokens: int = 1500) -> None:
        self.cluster = cluster
        self.num_done = 0
        self._max_tokens = max_tokens
        self._is_over = False
        self._tasks = [asyncio.create_task(self._keep(index)) for index in range(num_seqs)]

    async def finish(self) -> None:
        """Everything that runs ends, and all that ended was right."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _keep(self, index: int) -> None:
        rng = random.Random(index)
        while not self._is_over:
            prompt = [rng.randrange(3, 1000) for _ in range(rng.randint(1, 60))]
            running = self.cluster.submit(prompt, seed=rng.getrandbits(64), max_tokens=rng.randint(self._max_tokens // 3, self._max_tokens))
            await running.check()
            assert running.sink.choices[0].finish_reason is FinishReason.LENGTH
            self.num_done += 1


async def shares(cluster: Cluster, count: Callable[[], Sequence[int]], indices: Sequence[int]) -> list[float]:
    """What each of these services did of the work of the next while, 1.0 being its fair share."""
    before = count()
    await cluster.until(lambda: sum(count()) - sum(before) > 200 * NUM_SEQS)
    done = [after - start for start, after in zip(before, count(), strict=True)]
    return [done[index] * len(indices) / sum(done) for index in indices]


async def test_verifiers_from_one_to_three_and_back() -> None:
    async with Cluster([VERIFIER], [DRAFTER], discovered=True, **FAST) as cluster:
        await cluster.all_there()
        load = Load(cluster)
        engine = cluster.engine
        await cluster.until(lambda: len(engine.lanes[0].running) == NUM_SEQS)
        for _ in range(2):
            await cluster.add_verifier()
        cluster.list_verifiers(0, 1, 2)
        await cluster.until(lambda: len(engine.lanes) == 3 and min(len(lane.running) for lane in engine.lanes) >= FAIR_SHARE * NUM_SEQS / 3)
        for share in await shares(cluster, lambda: [verifier.num_rows for verifier in cluster.verifiers], (0, 1, 2)):
            assert share >= FAIR_SHARE
        assert engine.counters.num_moves > 0
        assert engine.counters.num_verifier_losses == engine.counters.num_preemptions == 0
        cluster.list_verifiers(2)
        for index in (0, 1):
            cluster.network.drain(f"v{index}:1")
        await cluster.until(lambda: len(engine.lanes) == 1)
        await load.finish()
        assert engine.counters.num_handovers > 0
        assert engine.counters.num_verifier_losses == 0
        assert [verifier.num_blocks_used for verifier in cluster.verifiers[:2]] == [0, 0]


async def test_drafters_from_one_to_four_and_back() -> None:
    async with Cluster([VERIFIER, VERIFIER], [DRAFTER], discovered=True, **FAST) as cluster:
        await cluster.all_there()
        load = Load(cluster)
        await cluster.until(lambda: cluster.drafters[0].num_open == NUM_SEQS)
        for _ in range(3):
            await cluster.add_drafter()
        cluster.list_drafters(0, 1, 2, 3)
        await cluster.until(lambda: min(drafter.num_open for drafter in cluster.drafters) >= FAIR_SHARE * NUM_SEQS / 4)
        for share in await shares(cluster, lambda: [drafter.num_rows for drafter in cluster.drafters], (0, 1, 2, 3)):
            assert share >= FAIR_SHARE
        assert cluster.engine.counters.num_drafter_moves > 0
        cluster.list_drafters(3)
        cluster.network.drain("d0:1")
        await cluster.kill_drafter(1)
        cluster.network.drain("d2:1")
        await until(lambda: [len(lane.links) for lane in cluster.engine.lanes] == [1, 1])
        await cluster.until(lambda: cluster.drafters[3].num_open >= NUM_SEQS - 1)
        await load.finish()
        assert cluster.engine.counters.num_drafter_handovers > 0
        assert cluster.engine.counters.num_drafter_losses == 2  # one for each lane


async def test_a_killed_replica_returns_under_another_address() -> None:
    async with Cluster([VERIFIER] * 2, [DRAFTER] * 2, discovered=True, **FAST) as cluster:
        await cluster.all_there()
        load = Load(cluster, max_tokens=600)
        await cluster.until(lambda: all(lane.running for lane in cluster.engine.lanes))
        await cluster.kill_verifier(0)
        await cluster.kill_drafter(0)
        cluster.list_verifiers(1)
        cluster.list_drafters(1)
        await cluster.until(lambda: [lane.index for lane in cluster.engine.lanes] == [1])
        verifier, drafter = await cluster.add_verifier(), await cluster.add_drafter()
        cluster.list_verifiers(1, verifier)
        cluster.list_drafters(1, drafter)
        await cluster.until(lambda: cluster.verifiers[verifier].num_rows > 100 and cluster.drafters[drafter].num_rows > 100)
        assert [lane.index for lane in cluster.engine.lanes] == [1, 2]
        await load.finish()
        assert cluster.engine.counters.num_verifier_losses == 1


async def test_drafters_of_several_methods_are_swapped_while_requests_run() -> None:
    """A short window, few drafts, bad guesses: each has its own limits, and none changes a token."""
    scripts = [DRAFTER, DrafterScript(max_num_draft_tokens=2, max_model_len=300, max_num_seqs=8, acceptance=0.3)]
    async with Cluster([VERIFIER] * 2, scripts, discovered=True, **FAST) as cluster:
        await cluster.all_there()
        load = Load(cluster, max_tokens=600)
        await cluster.until(lambda: all(drafter.num_rows > 200 for drafter in cluster.drafters))
        assert cluster.drafters[1].num_open <= 8
        # One method is replaced under a new address, the other one under its own.
        new = await cluster.add_drafter(acceptance=0.9, max_num_draft_tokens=4)
        cluster.list_drafters(1, new)
        cluster.network.drain("d0:1")
        await cluster.restart_drafter(1, acceptance=0.5, max_num_draft_tokens=8, max_model_len=4096, max_num_seqs=64)
        num_before = cluster.drafters[0].num_rows
        await cluster.until(lambda: cluster.drafters[new].num_rows > 200 and cluster.drafters[1].num_rows > 200)
        await load.finish()
        assert cluster.drafters[0].num_rows - num_before <= NUM_SEQS
        counters = cluster.engine.counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert counters.num_garbage_drafts == counters.num_bad_rows == 0


COVERED = (
    "num_moves", "num_drafter_moves", "num_handovers", "num_drafter_handovers", "num_verifier_losses", "num_drafter_losses", "num_accepted_tokens",
)  # fmt: skip


class Storm:
    """Verifiers and drafters that come, go, drain and die, while requests come and are cancelled."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.requests: list[Running] = []
        self.verifiers = {0, 1}
        self.drafters = {0, 1}
        self.balancer = Balancer(cluster.engine._admission)

    @property
    def is_moving(self) -> bool:
        """Whether a step must come without anything else happening."""
        return any(lane.is_ready and lane.running for lane in self.cluster.engine.lanes)

    async def act(self) -> None:
        rng, cluster = self.random, self.cluster
        if sum(not request.sink.ended for request in self.requests) < 20:
            prompt = [rng.randrange(3, 1000) for _ in range(rng.randint(1, 50))]
            self.requests.append(cluster.submit(prompt, seed=rng.getrandbits(64), max_tokens=rng.randint(1, 200), n=rng.choice((1, 1, 2))))
        if rng.random() < 0.02:
            rng.choice(self.requests).handle.cancel()
        if rng.random() < 0.1:
            self.balancer.look()
        if rng.random() < 0.04:
            await self.scale()

    def list_all(self) -> None:
        """The name server knows everything that is there."""
        self.cluster.list_verifiers(*sorted(self.verifiers))
        self.cluster.list_drafters(*sorted(self.drafters))

    async def scale(self) -> None:
        rng, cluster, network = self.random, self.cluster, self.cluster.network
        for kind, alive, add, show in (
            ("v", self.verifiers, cluster.add_verifier, cluster.list_verifiers),
            ("d", self.drafters, cluster.add_drafter, cluster.list_drafters),
        ):
            if len(alive) < 4 and rng.random() < 0.5:
                alive.add(await add())
            elif len(alive) > 1:
                index = rng.choice(sorted(alive))
                alive.discard(index)
                if rng.random() < 0.5:
                    network.drain(f"{kind}{index}:1")
                else:
                    network.kill(f"{kind}{index}:1")
            show(*sorted(alive) if rng.random() < 0.9 else ())


@pytest.mark.parametrize("seed", range(3))
async def test_random_scaling(seed: int) -> None:
    verifier = VerifierScript(max_outstanding_rounds=2, num_usable_blocks=400, delay_s=0.0005)
    async with Cluster(
        [verifier] * 2, [DrafterScript(), DrafterScript(acceptance=0.5, max_model_len=150)], discovered=True, max_outstanding_rounds=1 + seed % 3,
        schedule=[[1, 6, 4], [7, 9, 0], [10, 16, 2]], discovery_interval_s=0.05, min_draft_wait_ms=3.0, verifier_wait_s=30.0,
    ) as cluster:  # fmt: skip
        await cluster.all_there()
        storm = Storm(cluster, seed)
        counters = cluster.engine.counters
        while cluster.num_steps < 1_500 or (cluster.num_steps < 15_000 and not all(getattr(counters, name) for name in COVERED)):
            if cluster.engine.ready.is_ready:
                await storm.act()
            else:
                storm.list_all()
            num_steps = cluster.num_steps
            await asyncio.sleep(0)
            await until(lambda num_steps=num_steps: cluster.num_steps > num_steps or not storm.is_moving)  # type: ignore[misc]
        storm.list_all()
        for request in storm.requests:
            await request.sink.wait()
            assert request.sink.error is None, request.sink.error
            for index, choice in enumerate(request.sink.choices):
                expected = request.expected(index)
                assert choice.token_ids == expected[: len(choice.token_ids)]
                assert choice.finish_reason is FinishReason.CANCELLED or choice.token_ids == expected
        assert [name for name in COVERED if not getattr(counters, name)] == []
        assert counters.num_bad_rows == 0
        await until(lambda: len(cluster.engine.lanes) == len(storm.verifiers))
        await until(lambda: all(cluster.verifiers[index].num_blocks_used == 0 for index in storm.verifiers))
