"""Every number of the coordinator against one that is counted by hand: at the scripted services, at the clients, or in the books."""

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields

import pytest

from coordinator import exposition
from coordinator.counters import Counters
from coordinator.exposition_variants import VARIANT_METRICS
from coordinator.metrics import MAX_PEERS, OTHER, Metrics, StepParts
from coordinator.sequence import Sequence as Choice
from specwire.messages import DraftResult, RowStatus, VerifyResult, VerifyRound
from specwire.metrics import LATENCY_BOUNDS, NUM_TOKENS_BOUNDS
from tests.metrics.scrape import Series, by_name, make_scraper, series_of, value
from tests.scripted.cluster import Cluster, Running
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

PREFIX = "specwire_coordinator_"
SERVED = {"verifiers": [VerifierScript(max_num_seqs=4)], "drafters": [DrafterScript(acceptance=0.6)], "k": 3, "min_draft_wait_ms": 10_000}


def scraper(cluster: Cluster) -> Callable[[], Series]:
    return make_scraper(exposition.METRICS, lambda: exposition.collect(cluster.engine))


class Observer:
    """Keeps what passes between the coordinator and its scripted peers, and the books of every choice."""

    def __init__(self, cluster: Cluster) -> None:
        self.rounds: list[VerifyRound] = []
        self.results: list[VerifyResult] = []
        self.replies: list[DraftResult] = []
        self.choices: list[Choice] = []
        self.running: list[Running] = []
        self._cluster = cluster
        verifier, drafter = cluster.verifiers[0], cluster.drafters[0]
        receive, launch, answer = verifier.receive, verifier.launch, drafter.answer
        verifier.receive = lambda session, message: (self.rounds.append(message), receive(session, message))[1]  # type: ignore[method-assign]
        verifier.launch = lambda session: self._keep(self.results, launch(session))  # type: ignore[method-assign]
        drafter.answer = lambda session, message: self._keep(self.replies, answer(session, message))  # type: ignore[method-assign]

    def submit(self, prompt: Sequence[int], **sampling: object) -> Running:
        known = set(self._cluster.engine._requests)
        self.running.append(self._cluster.submit(prompt, **sampling))  # type: ignore[arg-type]
        [request] = set(self._cluster.engine._requests) - known
        self.choices += request.sequences
        return self.running[-1]

    @staticmethod
    def _keep(kept: list, message: object) -> object:
        if message is not None:
            kept.append(message)
        return message


def check_histogram(series: Series, name: str, numbers: Sequence[int], bounds: Sequence[int], unit: int, **labels: str) -> None:
    """A histogram holds exactly these numbers."""
    counts = [0] * (len(bounds) + 1)
    for number in numbers:
        counts[bisect.bisect_left(bounds, number)] += 1
    cumulative = [sum(counts[: i + 1]) for i in range(len(counts))]
    buckets = sorted(
        (float(dict(key)["le"]), count) for key, count in by_name(series, f"{name}_bucket").items() if labels.items() <= dict(key).items()
    )
    assert [count for _, count in buckets] == cumulative, name
    assert value(series, f"{name}_count", **labels) == len(numbers)
    assert value(series, f"{name}_sum", **labels) == sum(numbers) / unit


async def test_every_number_is_the_one_counted_by_hand() -> None:
    async with Cluster(**SERVED) as cluster:  # type: ignore[arg-type]
        await cluster.all_there()
        observer = Observer(cluster)
        first = [observer.submit(range(3, 3 + 5 * i), seed=i, max_tokens=4 * i, n=1 + i % 2) for i in range(1, 7)]
        waiting = observer.submit([5, 6, 7], seed=99, max_tokens=10)
        waiting.handle.cancel()
        first += [observer.submit(range(3, 28), seed=7, max_tokens=3), observer.submit([9, 8], seed=8, max_tokens=30, max_draft_tokens=0)]
        await asyncio.gather(*(request.check() for request in first))
        await waiting.sink.wait()
        await cluster.until(lambda: not cluster.engine.lanes[0].in_flight and not cluster.engine.lanes[0].closes)
        series, address, drafter = scraper(cluster)(), cluster.engine.lanes[0].address, cluster.engine.lanes[0].links[0].drafter.address
        check_books(series, cluster.engine.counters)
    check_steps(series, observer, address)
    check_drafts(series, observer, drafter)
    check_requests(series, observer)
    ended = {PREFIX + name: value(series, PREFIX + name) for name in ("running_requests", "waiting_sequences", "ready")}
    assert ended == {f"{PREFIX}running_requests": 0, f"{PREFIX}waiting_sequences": 0, f"{PREFIX}ready": 1}
    assert by_name(series, f"{PREFIX}peer_up") == {
        (("address", address), ("service", "verifier")): 1,
        (("address", drafter), ("service", "drafter")): 1,
    }


def check_books(series: Series, counters: Counters) -> None:
    """Everything in counters.py has a metric."""
    plain = {field.name for field in fields(Counters)} - {"fallbacks", "outcomes"}
    missing = plain ^ exposition.COUNTS.keys()
    assert not missing, f"coordinator/exposition.py: COUNTS must have one entry for each count of counters.py; {missing} is not in both"
    for name, metric in exposition.COUNTS.items():
        assert value(series, metric.name) == getattr(counters, name), name
    for labels, count in by_name(series, f"{PREFIX}fallbacks_total").items():
        assert count == counters.fallbacks[dict(labels)["cause"]]


def check_steps(series: Series, observer: Observer, address: str) -> None:
    num_rounds = len(observer.rounds)
    assert num_rounds == len(observer.results) > 20
    assert value(series, f"{PREFIX}rounds_total") == num_rounds
    assert value(series, f"{PREFIX}rows_total") == sum(len(round_.rows) for round_ in observer.rounds)
    assert value(series, f"{PREFIX}step_seconds_count", verifier=address) == num_rounds
    assert value(series, f"{PREFIX}step_speculative_tokens_count", verifier=address) == num_rounds
    assert value(series, f"{PREFIX}step_speculative_tokens_sum", verifier=address) == 3 * num_rounds
    parts = {part: value(series, f"{PREFIX}step_part_seconds_sum", verifier=address, part=part) for part in StepParts._fields}
    assert sum(parts.values()) == pytest.approx(value(series, f"{PREFIX}step_seconds_sum", verifier=address), abs=1e-12)
    assert min(parts["plan"], parts["propose"], parts["verify_hop"], parts["commit"]) > 0
    assert (parts["forward"], parts["verify_queue"]) == (0, 0), "scripted verifiers give no times"
    last = observer.results[-1]
    assert value(series, f"{PREFIX}kv_blocks", verifier=address) == 2048
    assert value(series, f"{PREFIX}kv_blocks_used", verifier=address) == 2048 - last.free_blocks + last.promised_blocks
    assert value(series, f"{PREFIX}running_sequences", verifier=address) == 0
    assert value(series, f"{PREFIX}speculative_tokens", verifier=address) == 3


def check_drafts(series: Series, observer: Observer, drafter: str) -> None:
    verified: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    num_drafts = 0
    for round_, result in zip(observer.rounds, observer.results, strict=True):
        for row, answer in zip(round_.rows, result.rows, strict=True):
            assert answer.status is RowStatus.OK
            num_drafts += bool(row.draft_tokens)
            verified.update(range(len(row.draft_tokens)))
            accepted.update(range(answer.num_accepted))
    assert 0 < accepted.total() < verified.total()
    assert value(series, f"{PREFIX}drafts_total") == num_drafts
    assert value(series, f"{PREFIX}verified_tokens_total") == verified.total()
    assert value(series, f"{PREFIX}accepted_tokens_total") == accepted.total()
    for name, counts in (("verified", verified), ("accepted", accepted)):
        at = {int(dict(labels)["position"]): count for labels, count in by_name(series, f"{PREFIX}{name}_at_position_total").items()}
        assert at == {position: counts[position] for position in range(3)}
    num_proposed = sum(len(row.draft_tokens) for reply in observer.replies for row in reply.rows)
    assert value(series, f"{PREFIX}draft_tokens_total", drafter=drafter) == num_proposed >= verified.total()
    assert value(series, f"{PREFIX}draft_reply_seconds_count", drafter=drafter) == len(observer.replies)
    assert value(series, f"{PREFIX}draft_timeouts_total", drafter=drafter) == 0
    assert value(series, f"{PREFIX}drafter_open_sequences", drafter=drafter) == 0


def check_requests(series: Series, observer: Observer) -> None:
    requests = observer.running
    choices = [choice for request in requests for choice in request.sink.choices]
    lengths = [len(choice.token_ids) for choice in choices]
    begun = [choice for choice in observer.choices if choice.first_token_ns]
    assert value(series, f"{PREFIX}requests_total") == len(requests)
    assert value(series, f"{PREFIX}request_seconds_count") == len(requests)
    assert value(series, f"{PREFIX}generated_tokens_total") == sum(lengths) > 100
    check_histogram(series, f"{PREFIX}prompt_tokens", [len(request.prompt) for request in requests], NUM_TOKENS_BOUNDS, 1)
    check_histogram(series, f"{PREFIX}sequence_tokens", lengths, NUM_TOKENS_BOUNDS, 1)
    reasons = Counter(choice.finish_reason.label for choice in choices if choice.finish_reason)
    shown = {dict(labels)["reason"]: count for labels, count in by_name(series, f"{PREFIX}sequences_total").items()}
    assert shown == {"stop": 0, "length": reasons["length"], "cancelled": 1, "error": 0}
    assert value(series, f"{PREFIX}cached_tokens_total") == sum(choice.usage.num_cached_tokens for choice in choices if choice.usage) > 0
    # Times, from the books of each choice.
    check_histogram(
        series, f"{PREFIX}time_to_first_token_seconds", [c.first_token_ns - c.request.arrived_ns for c in begun], LATENCY_BOUNDS, 10**9
    )  # fmt: skip
    check_histogram(series, f"{PREFIX}queue_seconds", [c.placed_ns - c.queued_ns for c in begun], LATENCY_BOUNDS, 10**9)
    assert value(series, f"{PREFIX}inter_token_latency_seconds_count") == sum(lengths) - len(begun)
    between_ns = sum(choice.last_token_ns - choice.first_token_ns for choice in begun)
    assert value(series, f"{PREFIX}inter_token_latency_seconds_sum") == between_ns / 1e9
    assert value(series, f"{PREFIX}request_seconds_sum") >= max(choice.last_token_ns - choice.request.arrived_ns for choice in begun) / 1e9


async def test_before_traffic_everything_is_there_and_zero() -> None:
    async with Cluster(**SERVED) as cluster:  # type: ignore[arg-type]
        await cluster.all_there()
        series = scraper(cluster)()
    names = {name for metric in exposition.METRICS for name in series_of(metric)}
    without_a_policy = {f"{PREFIX}{name}" for name in ("cost_error_ratio", "cost_factor", "calibration_error")}
    of_a_canary = {name for metric in VARIANT_METRICS for name in series_of(metric)}
    assert names - without_a_policy - of_a_canary == {name for name, _ in series}, "a family has no series before traffic"
    states = {"ready", "peer_up", "kv_blocks"}
    assert {name.removeprefix(PREFIX) for (name, _), number in series.items() if number} == states
    positions = {dict(labels)["position"] for labels in by_name(series, f"{PREFIX}accepted_at_position_total")}
    assert positions == {"0", "1", "2"}
    assert {dict(labels)["cause"] for labels in by_name(series, f"{PREFIX}fallbacks_total")} == set(exposition.CAUSES)


async def test_nothing_is_there_yet_and_nothing_fails() -> None:
    async with Cluster(**SERVED, absent=["v0", "d0"]) as cluster:  # type: ignore[arg-type]
        series = scraper(cluster)()
    assert value(series, f"{PREFIX}ready") == 0
    assert set(by_name(series, f"{PREFIX}peer_up").values()) == {0}
    assert set(by_name(series, f"{PREFIX}rounds_total").values()) == {0}


async def test_what_was_counted_stays_when_its_peer_is_forgotten() -> None:
    async with Cluster(**SERVED) as cluster:  # type: ignore[arg-type]
        await cluster.all_there()
        await cluster.submit([3, 4, 5], seed=1, max_tokens=20).check()
        before = scraper(cluster)()
    address = cluster.engine.lanes.pop().address
    after = scraper(cluster)()
    assert value(after, f"{PREFIX}step_seconds_count", verifier=address) == value(before, f"{PREFIX}step_seconds_count", verifier=address) > 0
    assert by_name(after, f"{PREFIX}draft_tokens_total") == by_name(before, f"{PREFIX}draft_tokens_total")
    assert by_name(after, f"{PREFIX}running_sequences") == {}


async def test_late_and_lost_drafters_are_counted_where_they_happen() -> None:
    async with Cluster([VerifierScript()], [DrafterScript(delay_s=30.0)], k=3, min_draft_wait_ms=1) as cluster:
        await cluster.all_there()
        await cluster.submit([3, 4, 5], seed=1, max_tokens=8).check()
        drafter = cluster.engine.lanes[0].links[0].drafter.address
        late = scraper(cluster)()
        await cluster.kill_drafter(0)
        await cluster.until(lambda: cluster.engine.counters.num_drafter_losses == 1)
        lost = scraper(cluster)()
    assert value(late, f"{PREFIX}draft_timeouts_total", drafter=drafter) == value(late, f"{PREFIX}drafter_timeouts_total") == 1
    assert value(late, f"{PREFIX}fallbacks_total", cause="drafter_timeout") == 1
    assert value(late, f"{PREFIX}fallbacks_total", cause="no_drafter") == cluster.engine.counters.fallbacks["no_drafter"] > 0
    assert (value(lost, f"{PREFIX}peer_up", service="drafter", address=drafter), value(lost, f"{PREFIX}drafter_losses_total")) == (0, 1)
    assert value(lost, f"{PREFIX}draft_timeouts_total", drafter=drafter) == 1


async def test_a_deadline_counts_as_a_failed_request() -> None:
    async with Cluster([VerifierScript(delay_s=30.0)]) as cluster:
        await cluster.ready()
        request = cluster.submit([3, 4, 5], timeout_ms=1, max_tokens=5, n=2)
        await request.sink.wait()
        series = scraper(cluster)()
    assert by_name(series, f"{PREFIX}failed_requests_total") == {(("code", "deadline_exceeded"),): 1, (("code", "unavailable"),): 0}
    assert value(series, f"{PREFIX}sequences_total", reason="error") == 2


def test_addresses_beyond_the_bound_share_a_series() -> None:
    metrics = Metrics()
    for index in range(MAX_PEERS + 50):
        metrics.lane(f"v{index}:1").num_speculative_tokens += 1
        metrics.drafter(f"d{index}:1").num_timeouts += 1
    assert len(metrics.lanes) == len(metrics.drafters) == MAX_PEERS + 1
    assert metrics.drafters[OTHER].num_timeouts == 50
    assert metrics.lane("v3:1") is metrics.lanes["v3:1"]
