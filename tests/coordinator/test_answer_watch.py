"""Verifiers that hang while their connections hold."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.answer_watch import AnswerWatch
from specwire.errors import UnavailableError
from specwire.messages import VerifyRound
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

FOREVER_S = 1000.0
PROMPT = [5, 6, 7]


def hangs_from(number: int) -> Any:
    """A delay: of the number-th round with rows and all after it forever."""
    num_rounds = 0

    def delay_s(message: VerifyRound) -> float:
        nonlocal num_rounds
        num_rounds += bool(message.rows)
        return FOREVER_S if num_rounds >= number else 0.0

    return delay_s


@pytest.mark.parametrize("num_drafters", [0, 1])
async def test_sequences_of_a_verifier_that_hangs_go_on_elsewhere(num_drafters: int, caplog: pytest.LogCaptureFixture) -> None:
    scripts = [VerifierScript(delay_s=hangs_from(4)), VerifierScript(delay_s=0.001)]
    async with Cluster(scripts, [DrafterScript()] * num_drafters, verifier_timeout_s=0.3) as cluster:
        await cluster.ready()
        await cluster.all_there()
        requests = [cluster.submit([*PROMPT, seed], seed=seed, max_tokens=40) for seed in range(4)]
        await cluster.until(lambda: cluster.engine.counters.num_verifier_timeouts > 0)
        await cluster.restart_verifier(0, delay_s=0.0)
        for request in requests:
            await request.check()
        counters = cluster.engine.counters
        assert 1 <= counters.num_verifier_timeouts <= counters.num_verifier_losses
    assert "is not answered after 0." in caplog.text
    assert "it seems to hang" in caplog.text


async def test_one_that_stops_answering_forever_is_an_error_in_the_end() -> None:
    async with Cluster([VerifierScript(delay_s=FOREVER_S)], verifier_timeout_s=0.05) as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=4)
        choice = (await request.sink.wait()).choices[0]
        assert choice.error is not None
        assert "it seems to hang" in choice.error.message
        assert cluster.engine.counters.num_verifier_timeouts == 6


async def test_zero_waits_without_end() -> None:
    async with Cluster([VerifierScript(delay_s=hangs_from(3))], verifier_timeout_s=0.0) as cluster:
        request = (await cluster.ready()).submit(PROMPT, seed=1, max_tokens=40)
        await cluster.until(lambda: len(request.sink.choices[0].token_ids) > 0)
        assert cluster.engine.lanes[0]._watch._timer is None
        await cluster.restart_verifier(0, delay_s=0.0)
        await request.check()


class Clock:
    """Time that a test moves on, for the watch and for its timers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self._timers: list[tuple[float, Any]] = []
        monkeypatch.setattr("coordinator.answer_watch.time", SimpleNamespace(monotonic_ns=lambda: round(self.now_s * 1e9)))
        monkeypatch.setattr(
            "coordinator.answer_watch.asyncio", SimpleNamespace(get_running_loop=lambda: SimpleNamespace(call_later=self._call_later))
        )

    def _call_later(self, seconds: float, call: Any) -> Any:
        self._timers.append((self.now_s + seconds, call))
        return SimpleNamespace(cancel=self._timers.clear)

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            self.now_s, call = self._timers.pop(0)
            call()
        self.now_s = end_s

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)


class Watched:
    def __init__(self, clock: Clock, measured_ms: float = 0.0) -> None:
        self.clock = clock
        self.in_flight: deque[Any] = deque()
        self.errors: list[UnavailableError] = []
        self.watch = AnswerWatch(60.0, self.in_flight, self.errors.append)
        self.watch.start(measured_ms)

    def send(self, number: int) -> None:
        times = SimpleNamespace(sent_ns=self.clock.now_ns)
        self.in_flight.append(SimpleNamespace(number=number, plan=SimpleNamespace(times=times)))

    def answer(self) -> None:
        self.watch.answered(self.in_flight.popleft().plan.times.sent_ns, self.clock.now_ns)


def test_a_silent_verifier_is_given_up_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Watched(clock)
    clock.run(500)
    watched.send(1)
    clock.run(59)
    assert not watched.errors
    clock.run(5)
    assert "round 1 is not answered after 61.0 s" in str(watched.errors[0])
    clock.run(1000)
    assert len(watched.errors) == 1


@pytest.mark.parametrize("is_measured", [True, False])
def test_slow_verifiers_have_more_time(monkeypatch: pytest.MonkeyPatch, is_measured: bool) -> None:
    """By what they measured themselves, and by their last rounds: a first chunk of minutes does not trip it."""
    clock = Clock(monkeypatch)
    watched = Watched(clock, measured_ms=10_000.0 if is_measured else 0.0)
    if not is_measured:
        watched.send(1)
        clock.run(10)
        watched.answer()
    watched.send(2)
    clock.run(199)
    assert not watched.errors
    clock.run(3)
    assert len(watched.errors) == 1


def test_a_round_that_waits_for_another_one_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Watched(clock)
    for number in range(1, 20):
        watched.send(number)
    for _ in range(19):
        clock.run(50)
        watched.answer()
    assert not watched.errors


def test_an_answer_that_came_while_the_process_was_stopped_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Watched(clock)
    watched.send(1)
    clock.now_s += 300  # nothing runs meanwhile
    clock._timers[0][1]()
    watched.answer()
    clock.run(500)
    assert not watched.errors


async def test_the_watch_ends_with_its_lane() -> None:
    async with Cluster(verifier_timeout_s=FOREVER_S) as cluster:
        lane = (await cluster.ready()).engine.lanes[0]
        assert lane._watch._timer is not None
    await asyncio.sleep(0)
    assert lane._watch._timer is None
