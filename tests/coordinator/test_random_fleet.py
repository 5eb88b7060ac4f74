"""Random changes of the fleet while requests run: drains, names that stand for others, canaries, and other models."""

import random
from collections.abc import Callable

import pytest

from specwire.errors import SpecwireError
from specwire.messages import CanaryAction, FinishReason
from tests.coordinator.adaptive_cluster import VERIFY_COST, drafter
from tests.coordinator.test_random_steps import SCHEDULE, Storm
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import GARBAGE
from tests.scripted.target import Target
from tests.scripted.verifier import VerifierScript

NUM_STEPS = 1_200
NUM_REPLICAS = 3
CANARIES = (
    '{"num_speculative_tokens": 2}', '{"num_speculative_tokens_per_batch_size": [[1, 16, 0]]}',
    '{"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 16, 1]]}', '{"enable_adaptive_verification": true}',
    '{"enable_adaptive_verification": false}', '{"num_speculative_tokens": 4}',
)  # fmt: skip


class FleetStorm(Storm):
    """A storm over replicas that come, go, say that they will, and change their model."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster, seed)
        self.model = 0
        self.targets: dict[int, Target] = {}
        self.num_drains = self.num_canaries = self.num_models = self.num_relists = 0
        self._served = "w0"

    async def act(self) -> None:
        actions: list[tuple[float, Callable[[], object]]] = [(40, self.join), (4, self.cancel), (20, self.read), (1, self.relist), (2, self.canary)]
        await self.change_fleet()
        weights, functions = zip(*actions, strict=True)
        self.random.choices(functions, weights)[0]()

    async def change_fleet(self) -> None:
        chance = self.random.random()
        if chance < 0.02:
            await self.kill_or_restart()
        elif chance < 0.025:
            self.drain()
        elif chance < 0.028:
            await self.change_model()

    def join(self) -> None:
        num_requests = len(self.requests)
        engine = self.cluster.engine
        super().join()
        if len(self.requests) > num_requests:
            assert engine.description is not None
            self.targets[num_requests] = Target(alphabet(engine.description.verifier.weights_hash))

    def relist(self) -> None:
        for kind in (self.cluster.list_verifiers, self.cluster.list_drafters):
            kind(*self.random.sample(range(NUM_REPLICAS), self.random.randint(1, NUM_REPLICAS)))
        self.num_relists += 1

    def canary(self) -> None:
        action, share = self.random.choice(list(CanaryAction)), self.random.choice((0.0, 0.3, 1.0))
        try:
            self.cluster.engine.set_canary(action, share, self.random.choice(CANARIES) if action is CanaryAction.START else "")
        except SpecwireError:
            return
        self.num_canaries += 1

    def drain(self) -> None:
        service = self.random.choice("vd"), self.random.randrange(NUM_REPLICAS)
        if service not in self.killed:
            self.cluster.network.drain(f"{service[0]}{service[1]}:1")
            self.killed.add(service)
            self.num_drains += 1

    async def change_model(self) -> None:
        """Replicas take it over one after the other, when they are started anew; now and then all at once."""
        self.model += 1
        for index in range(NUM_REPLICAS if self.random.random() < 0.5 else 1):
            await self._start("v", index)

    async def kill_or_restart(self) -> None:
        service = self.random.choice("vd"), self.random.randrange(NUM_REPLICAS)
        cluster, (kind, index) = self.cluster, service
        if service in self.killed or self.random.random() < 0.3:
            await self._start(kind, index)
        else:
            await (cluster.kill_verifier(index) if kind == "v" else cluster.kill_drafter(index))
            self.killed.add(service)

    async def heal(self) -> None:
        for index in range(NUM_REPLICAS):
            await self._start("v", index)
            await self._start("d", index)
        self.cluster.list_verifiers(*range(NUM_REPLICAS))
        self.cluster.list_drafters(*range(NUM_REPLICAS))
        for request in self.live:
            request.sink.stop_holding()

    def look(self) -> None:
        """Counts changes of what is served."""
        description = self.cluster.engine.description
        if description is not None and description.verifier.weights_hash != self._served:
            self._served = description.verifier.weights_hash
            self.num_models += 1

    async def check(self, number: int, request: Running) -> FinishReason | None:
        """Waits for a request's end: right so far by the model that it was admitted for."""
        await request.sink.wait()
        reason = None
        for index, choice in enumerate(request.sink.choices):
            assert request.params.seed is not None
            expected = self.targets[number].generate(request.prompt, request.params.max_tokens or 0, request.params.seed, index)
            assert choice.token_ids == expected[: len(choice.token_ids)], f"choice {index} of seed {request.params.seed}"
            reason = choice.finish_reason
            assert reason is not FinishReason.LENGTH or choice.token_ids == expected
            assert reason in (FinishReason.LENGTH, FinishReason.CANCELLED) or request.sink.error is not None, choice.error
        return reason

    async def _start(self, kind: str, index: int) -> None:
        if kind == "v":
            name = f"w{self.model}"
            await self.cluster.restart_verifier(index, weights_hash=name, alphabet=alphabet(name))
        else:
            await self.cluster.restart_drafter(index)
        self.killed.discard((kind, index))


def alphabet(weights_hash: str) -> tuple[int, ...]:
    """Other weights say other things."""
    return tuple(range(3 + 7 * int(weights_hash[1:]) % 400, 1000))


@pytest.mark.parametrize("seed", range(2))
async def test_a_fleet_that_changes_all_the_time(seed: int) -> None:
    random.seed(seed)
    script = VerifierScript(verify_cost=VERIFY_COST, weights_hash="w0", alphabet=alphabet("w0"), delay_s=0.0005)
    drafters = [drafter(garbage=GARBAGE), drafter(acceptance=0.5, max_num_seqs=6, max_num_draft_tokens=3), drafter()]
    config = {"discovery_interval_s": 0.05, "verifier_wait_s": 0.3, "max_queue": 16, "min_draft_wait_ms": 2, "max_stream_backlog": 16}
    async with Cluster([script] * NUM_REPLICAS, drafters, k=4, schedule=SCHEDULE, adaptive=seed % 2 > 0, discovered=True, **config) as cluster:
        await cluster.all_there()
        storm = FleetStorm(cluster, seed)
        while cluster.num_steps < NUM_STEPS or not min(storm.num_drains, storm.num_canaries, storm.num_models, storm.num_relists):
            await storm.act()
            storm.live = [request for request in storm.live if not request.sink.ended]
            await storm.pause()
            storm.look()
        await storm.heal()
        ends = [await storm.check(number, request) for number, request in enumerate(storm.requests)]
        assert ends.count(FinishReason.LENGTH) > 50
        await cluster.all_there()
        assert cluster.engine.description is not None
        assert cluster.engine.description.verifier.weights_hash == f"w{storm.model}"
        for verifier in cluster.verifiers:
            await cluster.until(lambda verifier=verifier: verifier.num_blocks_used == 0)  # type: ignore[misc]
