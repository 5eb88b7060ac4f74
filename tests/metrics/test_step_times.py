"""What a step's times become, with clocks that the test sets."""

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import metrics as metrics_module
from coordinator.metrics import Metrics, StepParts
from coordinator.plan import StepTimes
from specwire.messages import DraftResult, DraftRowResult, RoundTiming, RowStatus, VerifyCost, VerifyResult, VerifyRow
from specwire.metrics import Histogram

MS = 1_000_000
EPOCH = 1_700_000_000_000_000_000
TIMING = RoundTiming(EPOCH, EPOCH + 3 * MS, EPOCH + 13 * MS, EPOCH + 14 * MS)
NO_TABLE = VerifyCost()
TABLE = VerifyCost(num_tokens=(1, 8), step_ms=(4.0, 11.0), ms_per_row=0.5, ms_per_kv_token=0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What time.monotonic_ns() says in the module under test."""
    now = [0]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    return now


def commit(metrics: Metrics, times: StepTimes, timing: RoundTiming, *, cost: VerifyCost = NO_TABLE, num_tokens: int = 0, k: int = 4) -> None:
    rows = [VerifyRow(0, 1, 0, base_len=100), VerifyRow(1, 1, 0, base_len=200), VerifyRow(2, 1, 0, token_budget=5)]
    lane: Any = SimpleNamespace(address="v:1", verify_cost=cost)
    round_: Any = SimpleNamespace(rows=rows, plan=SimpleNamespace(times=times, num_speculative_tokens=k, chunks=[(None, 5)], choice=None))
    metrics.committed(lane, round_, VerifyResult(1, 0, 1, timing=timing, num_padded_tokens=num_tokens), {(10 * MS, 4): 3, (7 * MS, 1): 2})


def one(histogram: Histogram) -> float:
    """The only observation."""
    assert histogram.count == 1
    return histogram.sum


def test_a_step_with_drafts(clock: list[int]) -> None:
    metrics, clock[0] = Metrics(), 40 * MS
    commit(metrics, StepTimes(planned_ns=1 * MS, asked_ns=2 * MS, drafted_ns=7 * MS, sent_ns=9 * MS, answered_ns=29 * MS), TIMING)
    lane = metrics.lanes["v:1"]
    expected = StepParts(plan=3 * MS, propose=5 * MS, verify_hop=7 * MS, verify_queue=3 * MS, forward=10 * MS, commit=11 * MS)
    assert list(lane.recent) == [expected]
    assert {part: one(histogram) for part, histogram in lane.parts.items()} == {part: ns / 1e9 for part, ns in expected._asdict().items()}
    assert one(lane.step) == 0.039 == sum(expected) / 1e9
    assert one(lane.hop) == 0.006, "20 ms there and back, 14 of them at the verifier"
    assert (lane.num_speculative_tokens, one(lane.k)) == (4, 4)
    assert (metrics.inter_token_latency.count, metrics.inter_token_latency.sum) == (3 * 4 + 2, (3 * 10 + 2 * 7) / 1e3)
    assert metrics.num_generated_tokens == 14


def test_a_step_without_drafts_or_times_of_the_verifier(clock: list[int]) -> None:
    metrics, clock[0] = Metrics(), 12 * MS
    commit(metrics, StepTimes(planned_ns=1 * MS, sent_ns=2 * MS, answered_ns=10 * MS), RoundTiming())
    lane = metrics.lanes["v:1"]
    assert list(lane.recent) == [StepParts(1 * MS, 0, 8 * MS, 0, 0, 2 * MS)]
    assert lane.hop.count == 0


@pytest.mark.parametrize(
    "timing",
    [
        RoundTiming(EPOCH, EPOCH - 10**15, EPOCH + 10**15, EPOCH + 2 * 10**15),
        RoundTiming(EPOCH, EPOCH - 1, EPOCH - 2, EPOCH - 3),
        RoundTiming(EPOCH, EPOCH + 10**15, EPOCH, EPOCH),
    ],
)
def test_a_clock_that_is_set_at_the_verifier_makes_no_nonsense(clock: list[int], timing: RoundTiming) -> None:
    metrics, clock[0] = Metrics(), 12 * MS
    commit(metrics, StepTimes(planned_ns=1 * MS, sent_ns=2 * MS, answered_ns=10 * MS), timing)
    [parts] = metrics.lanes["v:1"].recent
    assert min(parts) >= 0
    assert sum(parts) == 11 * MS
    assert 0 <= one(metrics.lanes["v:1"].hop) <= 0.008


def test_predicted_and_measured_cost_of_the_same_rounds(clock: list[int]) -> None:
    metrics, clock[0] = Metrics(), 40 * MS
    times = StepTimes(planned_ns=1 * MS, sent_ns=9 * MS, answered_ns=29 * MS)
    commit(metrics, times, TIMING, cost=TABLE, num_tokens=8)
    lane = metrics.lanes["v:1"]
    assert one(lane.predicted) == pytest.approx((11.0 + 2 * 0.5 + 300 * 0.01) / 1e3)
    assert one(lane.measured) == 0.010
    commit(metrics, times, TIMING, cost=NO_TABLE, num_tokens=8)  # no table
    commit(metrics, times, RoundTiming(), cost=TABLE, num_tokens=8)  # no times
    commit(metrics, times, TIMING, cost=TABLE, num_tokens=0)  # nothing went through the model
    assert lane.predicted.count == lane.measured.count == 1
    assert lane.step.count == 4


def test_a_round_with_a_chunk_that_no_graph_takes_is_predicted_by_its_own_curve(clock: list[int]) -> None:
    metrics, times = Metrics(), StepTimes(planned_ns=1 * MS, sent_ns=9 * MS, answered_ns=29 * MS)
    for max_graph_row_tokens in (4, 5):
        table = VerifyCost((1, 8), (4.0, 11.0), max_graph_row_tokens=max_graph_row_tokens, chunk_num_tokens=(8, 16), chunk_ms=(20.0, 40.0))
        commit(metrics, times, TIMING, cost=table, num_tokens=8)
    assert metrics.lanes["v:1"].predicted.sum == pytest.approx((20.0 + 11.0) / 1e3)


def test_a_drafters_reply(clock: list[int]) -> None:
    metrics, clock[0] = Metrics(), 40 * MS
    link: Any = SimpleNamespace(drafter=SimpleNamespace(address="d:1"), asked=SimpleNamespace(sent_ns=15 * MS))
    rows = [
        DraftRowResult(RowStatus.OK, 0, 1, 5, [1, 2, 3]),
        DraftRowResult(RowStatus.CATCHING_UP, 1, 1, 5),
        DraftRowResult(RowStatus.OK, 2, 1, 5, [4]),
    ]
    metrics.drafted(link, DraftResult(1, 0, 1, rows, timing=TIMING))
    metrics.draft_missed(link)
    drafter = metrics.drafters["d:1"]
    assert (drafter.num_draft_tokens, drafter.num_timeouts) == (4, 1)
    assert (one(drafter.reply), one(drafter.hop)) == (0.025, 0.011)
    assert list(drafter.recent_ns) == [25 * MS]
