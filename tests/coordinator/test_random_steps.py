"""Ten thousand random steps over two verifiers and two drafters, with every fault that scripted services know."""

import asyncio
import random
from collections.abc import Callable

import pytest

from coordinator.counters import Counters
from specwire.errors import SpecwireError
from specwire.messages import FinishReason
from tests.coordinator.adaptive_cluster import VERIFY_COST, drafter
from tests.scripted.cluster import Cluster, Running
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import GARBAGE
from tests.scripted.verifier import VerifierScript

NUM_STEPS = 2_500
MOST_STEPS = 4 * NUM_STEPS
"""How drafts and rounds interleave depends on how busy the machine is: a storm that has not met everything by NUM_STEPS goes on."""
SCHEDULE = [[1, 3, 4], [4, 7, 2], [8, 10, 0], [11, 16, 3]]
MAX_PROMPT = 80
MAX_TOKENS = 60


class Storm:
    """Random actions on a cluster. Faults are drawn so that now and then everything works."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.requests: list[Running] = []
        self.live: list[Running] = []
        self.killed: set[tuple[str, int]] = set()
        self.num_cancels = 0
        self.num_refused = 0
        self._num_rows = 0

    @property
    def is_moving(self) -> bool:
        """Whether a step must come without anything else happening."""
        return any(lane.is_ready and any(not sequence.is_paused for sequence in lane.running) for lane in self.cluster.engine.lanes)

    async def act(self) -> None:
        actions: list[tuple[int, Callable[[], object]]] = [
            (30, self.join), (6, self.cancel), (20, self.read), (3, self.squeeze), (5, self.change_drafter), (2, self.change_verifier),
        ]  # fmt: skip
        if self.random.random() < 0.03:
            await self.kill_or_restart()
        weights, functions = zip(*actions, strict=True)
        self.random.choices(functions, weights)[0]()

    async def pause(self) -> None:
        """Lets a step come, if there is anything to step for."""
        num_steps = self.cluster.num_steps
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await self.cluster.until(lambda: self.cluster.num_steps > num_steps or not self.is_moving)

    def join(self) -> None:
        rng = self.random
        if len(self.live) >= 24:
            return
        prompt = [rng.randrange(3, 1000) for _ in range(rng.choice((1, 3, 4, 5, 16, 30, rng.randint(1, MAX_PROMPT))))]
        n = rng.choice((1, 1, 1, 2, 3))
        sink = CollectingSink(n, holds=rng.random() < 0.3, on_tokens=self.cluster.advance)
        try:
            request = self.cluster.submit(
                prompt, sink, seed=rng.getrandbits(64), n=n, max_tokens=rng.randint(1, MAX_TOKENS), priority=rng.choice((0, 0, 0, 1, -1)),
                max_draft_tokens=rng.choice((None, None, None, 0, 1, 3)), bad_words_token_ids=rng.choice(((), (), ((1, 2),))),
                timeout_ms=rng.choice((None, None, None, None, 30)), logprobs=rng.choice((None, None, 2)),
            )  # fmt: skip
        except SpecwireError:
            self.num_refused += 1
            return
        self.requests.append(request)
        self.live.append(request)

    def cancel(self) -> None:
        if self.live:
            self.random.choice(self.live).handle.cancel()
            self.num_cancels += 1

    def read(self) -> None:
        for request in self.live:
            request.sink.read(self.random.choice((0, 5, 1000)))

    def squeeze(self) -> None:
        """From no room for a second long sequence to more than enough."""
        script = self.random.choice(self.cluster.verifiers).script
        script.num_usable_blocks = self.random.choice((None, None, 36, 60, 100))

    def change_drafter(self) -> None:
        rng, script = self.random, self.random.choice(self.cluster.drafters).script
        script.acceptance = rng.choice((0.0, 0.5, 1.0))
        script.garbage = rng.choice(((), GARBAGE))
        script.delay_s = rng.choice((0.0, 0.0, 0.003, lambda _: rng.choice((0.0, 0.002, 0.02))))
        script.num_catch_up_rounds = rng.choice((0, 0, 3))

    def change_verifier(self) -> None:
        script = self.random.choice(self.cluster.verifiers).script
        script.delay_s = self.random.choice((0.0, 0.0, 0.0, 0.001))
        script.lose_row = self.random.choice((None, None, self._lose_row))

    async def kill_or_restart(self) -> None:
        kind, index = service = self.random.choice((("v", 0), ("v", 1), ("d", 0), ("d", 1)))
        cluster = self.cluster
        if service in self.killed or self.random.random() < 0.3:
            await (cluster.restart_verifier(index) if kind == "v" else cluster.restart_drafter(index))
            self.killed.discard(service)
        else:
            await (cluster.kill_verifier(index) if kind == "v" else cluster.kill_drafter(index))
            self.killed.add(service)

    async def heal(self) -> None:
        """Everything works again, and all clients read."""
        for index in range(2):
            await self.cluster.restart_verifier(index, num_usable_blocks=None, lose_row=None, delay_s=0.0)
            await self.cluster.restart_drafter(index, garbage=(), delay_s=0.0)
        for request in self.live:
            request.sink.stop_holding()

    def _lose_row(self, round_: int, row: object) -> bool:
        self._num_rows += 1
        return self._num_rows % 61 == 0


async def check(request: Running) -> FinishReason | None:
    """Waits for a request's end: whole and right, or cut short and right so far."""
    await request.sink.wait()
    reason = None
    for index, choice in enumerate(request.sink.choices):
        expected = request.expected(index)
        assert choice.token_ids == expected[: len(choice.token_ids)], f"choice {index} of seed {request.params.seed}"
        reason = choice.finish_reason
        if reason is FinishReason.LENGTH:
            assert choice.token_ids == expected
        else:
            assert reason is FinishReason.CANCELLED or request.sink.error is not None, choice.error
    return reason


@pytest.mark.parametrize("seed", range(4))
async def test_random_steps(seed: int) -> None:
    """With adaptive verification in every other storm."""
    script = VerifierScript(max_outstanding_rounds=2 + seed % 2, verify_cost=VERIFY_COST)
    drafters = [drafter(garbage=GARBAGE), drafter(acceptance=0.5, max_model_len=100, max_num_seqs=6, max_num_draft_tokens=3)]
    async with Cluster(
        [script] * 2,
        drafters,
        k=4,
        schedule=SCHEDULE,
        adaptive=seed % 2 > 0,
        min_draft_wait_ms=2,
        max_outstanding_rounds=1 + seed % 3,
        max_queue=16,
        max_stream_backlog=16,
    ) as cluster:
        await cluster.all_there()
        storm = Storm(cluster, seed)
        while cluster.num_steps < NUM_STEPS or (cluster.num_steps < MOST_STEPS and _find_missing(cluster.engine.counters)):
            await storm.act()
            storm.live = [request for request in storm.live if not request.sink.ended]
            await storm.pause()
        await storm.heal()
        ends = [await check(request) for request in storm.requests]
        _check_coverage(cluster.engine.counters, storm, ends)
        for verifier in cluster.verifiers:
            await cluster.until(lambda verifier=verifier: verifier.num_blocks_used == 0)  # type: ignore[misc]


def _check_coverage(counters: Counters, storm: Storm, ends: list[FinishReason | None]) -> None:
    """The storm has met what it is meant to test."""
    assert ends.count(FinishReason.LENGTH) > 50
    assert storm.num_cancels > 10
    assert _find_missing(counters) == []
    assert counters.num_bad_rows == 0


def _find_missing(counters: Counters) -> list[str]:
    """What the storm has not met."""
    names = (
        "num_accepted_tokens", "num_stale_rows", "num_rows_out_of_blocks", "num_dropped_rows", "num_preemptions", "num_pauses", "num_verifier_losses",
        "num_drafter_losses", "num_drafter_timeouts", "num_stale_drafts",
    )  # fmt: skip
    return [name for name in names if getattr(counters, name) == 0]
