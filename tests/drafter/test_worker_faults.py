"""What fails on the worker's thread ends the streams that it belongs to, and the worker only where nothing else is left."""

from collections.abc import Sequence

import pytest

from drafter_svc.method import Ask, Drafts
from drafter_svc.worker import Worker
from specwire.errors import InternalError, InvalidArgumentError, SpecwireError, UnavailableError
from specwire.messages import DraftResult, DraftRound, DraftRow, RowStatus
from tests.drafter.helpers import ScriptedMethod, open_request
from tests.drafter.worker_harness import Harness, first_round, result


def test_an_error_in_a_message_ends_only_its_session() -> None:
    method = ScriptedMethod()
    harness = Harness(method)
    a, inbox_a = harness.session("a")
    b, inbox_b = harness.session("b")
    for session in (a, b):
        harness.worker.submit(session, first_round(), 0)
    result(inbox_a)
    result(inbox_b)
    harness.worker.submit(a, first_round(2), 0)
    error = inbox_a.get(timeout=60)
    assert isinstance(error, InvalidArgumentError)
    assert "slot 0" in str(error)
    harness.worker.submit(a, first_round(3), 0)
    harness.worker.submit(b, DraftRound(1, 0, 2, rows=[DraftRow(0, 1, 2, 1)]), 0)
    assert result(inbox_b).rows[0].status is RowStatus.OK
    assert inbox_a.empty()
    assert len(method.sequences) == 1
    harness.worker.close_session(b)
    harness.stop()


def test_a_fault_while_drafting_ends_the_sessions_of_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    def propose(tokens: list[int], num_drafts: int) -> list[int]:
        if tokens[-1] == 13:
            raise ZeroDivisionError("unlucky")
        return [0] * num_drafts

    method = ScriptedMethod(propose)
    harness = Harness(method)
    a, inbox_a = harness.session("a")
    b, inbox_b = harness.session("b")
    harness.worker.submit(b, first_round(), 0)
    result(inbox_b)
    harness.worker.submit(a, DraftRound(1, 0, 1, opens=[open_request([13])], rows=[DraftRow(0, 1, 1, 1)]), 0)
    error = inbox_a.get(timeout=60)
    assert isinstance(error, InternalError)
    assert "ZeroDivisionError" in str(error)
    assert "unlucky" in caplog.text
    harness.worker.submit(b, DraftRound(1, 0, 2, rows=[DraftRow(0, 1, 2, 2)]), 0)
    assert result(inbox_b).rows[0].draft_tokens == [0, 0]
    harness.stop()


def test_a_fault_outside_the_method_ends_the_worker_rather_than_leave_its_clients_waiting() -> None:
    class Malformed(ScriptedMethod):
        def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
            return [tuple.__new__(Drafts, (RowStatus.OK, [0]))] * len(asks)

    harness = Harness(Malformed())
    session, inbox = harness.session("a")
    harness.worker.submit(session, first_round(), 0)
    assert isinstance(inbox.get(timeout=60), InternalError)
    with pytest.raises(InternalError, match=r"the drafter's thread failed with \w+Error"):
        harness.worker.broken.result(10)
    harness.stop()


def test_faults_in_a_row_break_the_worker() -> None:
    """Errors with a reason of their own do not count, and a batch that is drafted starts the count anew."""
    faults: list[type[Exception] | None] = [RuntimeError] * 4 + [InvalidArgumentError, None] + [RuntimeError] * 5
    left = list(faults)

    def propose(tokens: list[int], num_drafts: int) -> list[int]:
        if (error := left.pop(0)) is not None:
            raise error("no device")
        return [0] * num_drafts

    harness = Harness(ScriptedMethod(propose))
    for number, error in enumerate(faults):
        assert not harness.worker.broken.done()
        session, inbox = harness.session(str(number))
        harness.worker.submit(session, first_round(), 0)
        answer = inbox.get(timeout=60)
        assert isinstance(answer, DraftResult if error is None else SpecwireError)
        harness.worker.close_session(session)
    with pytest.raises(InternalError, match="5 batches in a row failed, the last one with RuntimeError: no device; the drafter ends"):
        harness.worker.broken.result(10)
    assert harness.worker.metrics.num_faults == 9
    harness.stop()


def test_a_fault_in_background_work_ends_every_session() -> None:
    method = ScriptedMethod()
    harness = Harness(method)
    a, inbox_a = harness.session("a")
    harness.worker.submit(a, first_round(), 0)
    result(inbox_a)

    def fail(budget: int) -> int:
        raise RuntimeError("no memory")

    method.catch_up = fail  # type: ignore[method-assign]
    harness.worker.submit(a, DraftRound(1, 0, 2), 0)
    assert inbox_a.get(timeout=60) is None
    assert isinstance(inbox_a.get(timeout=60), InternalError)
    assert not method.sequences
    harness.stop()


def test_what_keeps_the_method_from_being_made_is_told() -> None:
    def build() -> ScriptedMethod:
        raise UnavailableError("no such model")

    worker = Worker(build, max_num_seqs=1, chunk=1)
    worker.start()
    with pytest.raises(UnavailableError, match="no such model"):
        worker.ready.result(10)
    assert worker.stop(10)
