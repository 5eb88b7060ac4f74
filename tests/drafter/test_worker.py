"""The worker's thread: order, merging of lanes, fairness between rounds and background work, failures."""

import queue
import threading
from collections.abc import Sequence

import pytest

from drafter_svc.cost import DraftProfile
from drafter_svc.method import Ask, Drafts
from drafter_svc.worker import Worker
from specwire.engine.counts import PassCounts
from specwire.messages import DraftCommit, DraftRound, DraftRow, RowStatus
from tests.drafter.helpers import ScriptedMethod
from tests.drafter.worker_harness import Harness, Inbox, first_round, result


class GatedMethod(ScriptedMethod):
    """Waits for the gate in `propose`, so that messages pile up behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.caught_up = threading.Event()
        self.log: list[str] = []

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        self.log.append("propose")
        self.entered.set()
        assert self.gate.wait(60)
        return super().propose(asks)

    def catch_up(self, budget: int) -> int:
        computed = super().catch_up(budget)
        if computed:
            self.log.append("chunk")
        else:
            self.caught_up.set()
        return computed


def test_rounds_are_answered_in_order_and_timed() -> None:
    harness = Harness(ScriptedMethod())
    session, inbox = harness.session("a")
    harness.worker.submit(session, first_round(), received_ns=5)
    harness.worker.submit(session, DraftRound(1, 0, 2, commits=[DraftCommit(0, 1, 2, [21])]), received_ns=6)
    harness.worker.submit(session, DraftRound(1, 0, 3, rows=[DraftRow(0, 1, 3, 3)]), received_ns=7)
    first = result(inbox)
    assert first.rows[0].draft_tokens == [21, 22]
    assert first.rows[0].confidences.tolist() == [0.5, 0.5]
    assert first.timing.received_ns == 5 < first.timing.started_ns <= first.timing.finished_ns
    assert inbox.get(timeout=60) is None
    third = result(inbox)
    assert (third.round, third.rows[0].draft_tokens) == (3, [22, 23, 24])
    harness.stop()


def test_lanes_share_a_batch_but_a_session_is_never_ahead_of_its_own_rows() -> None:
    method = GatedMethod()
    harness = Harness(method)
    a, inbox_a = harness.session("a")
    b, inbox_b = harness.session("b")
    harness.worker.submit(a, first_round(), 0)
    assert method.entered.wait(60)
    # All of these wait while the first batch is held.
    harness.worker.submit(b, first_round(lane=1), 0)
    harness.worker.submit(a, DraftRound(1, 0, 2, commits=[DraftCommit(0, 1, 2, [30])], rows=[DraftRow(0, 1, 3, 1)]), 0)
    harness.worker.submit(a, DraftRound(1, 0, 3, commits=[DraftCommit(0, 1, 3, [40])], rows=[DraftRow(0, 1, 4, 1)]), 0)
    method.gate.set()
    assert [result(inbox_a).rows[0].draft_tokens for _ in range(3)] == [[21, 22], [31], [41]]
    assert result(inbox_b).lane == 1
    assert [len(batch) for batch in method.batches] == [1, 2, 1]
    harness.stop()


def test_rounds_come_before_background_work_but_do_not_starve_it() -> None:
    method = GatedMethod()
    harness = Harness(method)
    session, inbox = harness.session("a")
    method.num_behind = 3
    harness.worker.submit(session, first_round(), 0)
    assert method.entered.wait(60)
    for number in range(2, 11):
        harness.worker.submit(session, DraftRound(1, 0, number, rows=[DraftRow(0, 1, 2, 1)]), 0)
    method.gate.set()
    for _ in range(10):
        result(inbox)
    harness.stop()
    assert method.log.count("chunk") == 3
    positions = [index for index, entry in enumerate(method.log) if entry == "chunk"]
    assert positions[:2] == [4, 9], method.log


def test_answers_are_sent_before_background_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sleeps behind a batch, so that the event loop gets the interpreter; a round that comes meanwhile is served at once."""
    monkeypatch.setattr("drafter_svc.worker._ANSWER_S", 60.0)
    method = GatedMethod()
    method.gate.set()
    harness = Harness(method)
    session, inbox = harness.session("a")
    method.num_behind = 1
    harness.worker.submit(session, first_round(), 0)
    result(inbox)
    harness.worker.submit(session, DraftRound(1, 0, 2, rows=[DraftRow(0, 1, 2, 1)]), 0)
    result(inbox)
    assert method.log == ["propose", "propose"]
    monkeypatch.setattr("drafter_svc.worker._ANSWER_S", 0.001)
    harness.worker.submit(session, DraftRound(1, 0, 3, rows=[DraftRow(0, 1, 2, 1)]), 0)
    assert method.caught_up.wait(60)
    assert method.log == ["propose", "propose", "propose", "chunk"]
    harness.stop()


def test_background_work_goes_on_without_rounds() -> None:
    method = GatedMethod()
    harness = Harness(method)
    session, inbox = harness.session("a")
    method.num_behind = 5
    harness.worker.submit(session, DraftRound(1, 0, 1), 0)
    assert inbox.get(timeout=60) is None
    assert method.caught_up.wait(60)
    assert method.num_chunks == 5
    harness.stop()


def test_closing_a_session_frees_its_sequences_after_its_messages() -> None:
    method = ScriptedMethod()
    harness = Harness(method)
    session, inbox = harness.session("a")
    harness.worker.submit(session, first_round(), 0)
    harness.worker.close_session(session)
    harness.worker.close_session(session)
    assert result(inbox).rows[0].status is RowStatus.OK
    harness.stop()
    assert not method.sequences
    assert harness.worker.pool.num_free == 16


def test_what_was_run_to_measure_is_not_counted() -> None:
    method = ScriptedMethod(max_num_seqs=1)
    propose = method.propose

    def count(asks: Sequence[Ask]) -> list[Drafts]:
        method.counts.num_eager_passes += 1
        return propose(asks)

    method.propose = count  # type: ignore[method-assign]
    worker = Worker(lambda: method, max_num_seqs=1, chunk=32, cost_budget_s=0.01)
    worker.start()
    assert worker.ready.result(10) is method
    assert worker.profile.costs
    assert method.batches
    assert method.counts == PassCounts()
    assert worker.stop(10)


@pytest.mark.parametrize(("measured", "expected"), [(8, 8), (64, 32), (0, 32)])
def test_chunks_are_no_larger_than_replies_can_wait_for(monkeypatch: pytest.MonkeyPatch, measured: int, expected: int) -> None:
    method, budgets = GatedMethod(), []
    method.gate.set()
    catch_up = method.catch_up

    def record(budget: int) -> int:
        budgets.append(budget)
        return catch_up(budget)

    method.catch_up = record  # type: ignore[method-assign]
    monkeypatch.setattr("drafter_svc.worker.measure_draft_cost", lambda *args, **options: DraftProfile(chunk=measured))
    worker = Worker(lambda: method, max_num_seqs=16, chunk=32, cost_budget_s=1.0)
    worker.start()
    worker.ready.result(10)
    inbox: Inbox = queue.Queue()
    method.num_behind = 1
    worker.submit(worker.open_session("a", inbox.put), first_round(), received_ns=1)
    assert method.caught_up.wait(60)
    assert worker.stop(10)
    assert set(budgets) == {expected}
