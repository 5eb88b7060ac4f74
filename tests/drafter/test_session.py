"""Slots of one stream: what each kind of message and row does, without threads or gRPC."""

import pytest

from drafter_svc.method import Ask
from drafter_svc.ngram import Ngram
from drafter_svc.session import SequencePool, Session
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftCommit, DraftOpen, DraftRound, DraftRow, DraftRowResult, RowStatus, SlotRef
from tests.drafter.helpers import ScriptedMethod, open_request


def make_session(max_num_seqs: int = 4) -> tuple[Session, ScriptedMethod, SequencePool]:
    method, pool = ScriptedMethod(), SequencePool(max_num_seqs)
    return Session("test stream", method, pool), method, pool


def message(**parts: list) -> DraftRound:
    return DraftRound(1, 0, 1, **parts)


def test_opens_commits_and_closes_reach_the_method() -> None:
    session, method, pool = make_session()
    session.apply(message(opens=[open_request([1, 2], slot=5)], commits=[DraftCommit(5, 1, 2, [3])]))
    assert list(method.sequences.values()) == [[1, 2, 3]]
    (ask,) = session.plan([DraftRow(5, 1, 3, 4)])
    assert ask == Ask(next(iter(method.sequences)), 4)
    session.apply(message(closes=[SlotRef(5, 1)], opens=[open_request([9], slot=5, epoch=2)], commits=[DraftCommit(5, 2, 1, [8])]))
    assert list(method.sequences.values()) == [[9, 8]]
    session.close()
    session.close()
    assert not method.sequences
    assert pool.num_free == 4


@pytest.mark.parametrize(
    ("row", "status", "reason"),
    [
        (DraftRow(9, 1, 2, 4), RowStatus.STALE, "not open"),
        (DraftRow(-1, 1, 2, 4), RowStatus.STALE, "not open"),
        (DraftRow(0, 2, 2, 4), RowStatus.STALE, "epoch 1 has 2 tokens"),
        (DraftRow(0, 1, 1, 4), RowStatus.STALE, "base_len 1: epoch 1 has 2 tokens"),
        (DraftRow(0, 1, 3, 4), RowStatus.STALE, "base_len 3"),
        (DraftRow(0, 1, 2, -1), RowStatus.BAD, "num_drafts is -1"),
    ],
)
def test_wrong_rows_are_answered_for_themselves(row: DraftRow, status: RowStatus, reason: str) -> None:
    session, _, _ = make_session()
    session.apply(message(opens=[open_request([1, 2], slot=0), open_request([3], slot=1)]))
    wrong, right = session.plan([row, DraftRow(1, 1, 1, 4)])
    assert isinstance(wrong, DraftRowResult)
    assert (wrong.status, wrong.slot, wrong.epoch, wrong.base_len) == (status, row.slot, row.epoch, row.base_len)
    assert reason in wrong.error
    assert isinstance(right, Ask)
    assert session.counts[status.name] == 1


def test_second_row_of_a_slot_is_bad() -> None:
    session, _, _ = make_session()
    session.apply(message(opens=[open_request([1, 2])]))
    first, second = session.plan([DraftRow(0, 1, 2, 4), DraftRow(0, 1, 2, 4)])
    assert isinstance(first, Ask)
    assert isinstance(second, DraftRowResult)
    assert second.status is RowStatus.BAD


@pytest.mark.parametrize("commit", [DraftCommit(7, 1, 2, [3]), DraftCommit(0, 2, 2, [3]), DraftCommit(0, 1, 1, [3]), DraftCommit(0, 1, 5, [3])])
def test_commits_that_do_not_fit_change_nothing(commit: DraftCommit) -> None:
    session, method, _ = make_session()
    session.apply(message(opens=[open_request([1, 2])], commits=[commit]))
    assert list(method.sequences.values()) == [[1, 2]]
    assert session.counts["ignored commits"] == 1


def test_close_of_a_dead_life_is_ignored() -> None:
    session, method, _ = make_session()
    session.apply(message(opens=[open_request([1, 2], epoch=3)], closes=[SlotRef(0, 3), SlotRef(8, 1)]))
    session.apply(message(closes=[SlotRef(0, 2)]))
    assert len(method.sequences) == 1


def test_opening_a_live_slot_is_an_error_of_the_stream() -> None:
    session, _, _ = make_session()
    session.apply(message(opens=[open_request([1, 2], slot=6)]))
    with pytest.raises(InvalidArgumentError, match="slot 6 is opened with epoch 2, but its epoch 1 is live"):
        session.apply(message(opens=[open_request([1, 2], slot=6, epoch=2)]))


def test_a_full_drafter_answers_out_of_blocks_until_the_slot_is_reopened() -> None:
    session, method, pool = make_session(max_num_seqs=2)
    session.apply(message(opens=[open_request([1], slot=slot) for slot in range(3)]))
    plans = session.plan([DraftRow(slot, 1, 1, 4) for slot in range(3)])
    assert [isinstance(plan, Ask) for plan in plans] == [True, True, False]
    assert isinstance(plans[2], DraftRowResult)
    assert plans[2].status is RowStatus.OUT_OF_BLOCKS
    assert "all 2 sequences" in plans[2].error
    session.apply(message(commits=[DraftCommit(2, 1, 1, [5])]))
    session.apply(message(closes=[SlotRef(0, 1), SlotRef(2, 1)], opens=[open_request([1, 5], slot=2, epoch=2)]))
    assert isinstance(session.plan([DraftRow(2, 2, 2, 4)])[0], Ask)
    assert len(method.sequences) == 2
    session.close()
    assert pool.num_free == 2


def test_a_sequence_that_the_method_refuses_is_bad_and_the_others_are_not() -> None:
    pool = SequencePool(4)
    session = Session("test stream", Ngram(1, 2, max_num_drafts=4), pool)
    too_large = DraftOpen(0, 1, [1 << 40], 1, open_request([]).sampling, 0)
    session.apply(message(opens=[too_large, open_request([1, 1], slot=1), open_request([1, 1], slot=2)], commits=[DraftCommit(2, 1, 2, [1 << 40])]))
    bad_open, good, bad_commit = session.plan([DraftRow(0, 1, 1, 4), DraftRow(1, 1, 2, 4), DraftRow(2, 1, 3, 4)])
    assert isinstance(good, Ask)
    for bad in (bad_open, bad_commit):
        assert isinstance(bad, DraftRowResult)
        assert bad.status is RowStatus.BAD
        assert "32-bit" in bad.error
    assert pool.num_free == 3
    session.apply(message(closes=[SlotRef(0, 1), SlotRef(1, 1), SlotRef(2, 1)]))
    assert pool.num_free == 4
    assert session.num_slots == 0
