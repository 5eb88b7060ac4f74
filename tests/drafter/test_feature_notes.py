"""What a drafter's stream says of features reaches the method, for the sequences that it means and no others."""

import pytest

from drafter_svc.feature_counts import FeatureCounts
from drafter_svc.session import SequencePool, Session
from specwire.messages import DraftCommit, DraftRound, FeatureHandle, SlotRef
from tests.drafter.helpers import ScriptedMethod, open_request


class Notes:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.counts = FeatureCounts()
        self.heard: list[tuple] = []

    def note(self, seq_id: int, handle: FeatureHandle) -> None:
        self.heard.append(("note", seq_id, handle.new_block_ids))

    def grew(self, seq_id: int, num_positions: int) -> None:
        self.heard.append(("grew", seq_id, num_positions))

    def stop(self) -> None:
        self.heard.append(("stop",))


@pytest.fixture
def method() -> ScriptedMethod:
    method = ScriptedMethod()
    method.features = Notes()
    return method


def handle(slot: int, epoch: int, *blocks: int) -> FeatureHandle:
    return FeatureHandle(1, slot, epoch, "", "", list(blocks), 0, 8, 7, 0, "v:1")


def test_handles_and_commits_are_passed_on(method):
    session = Session("s", method, SequencePool(4))
    session.apply(DraftRound(1, 0, 1, opens=[open_request([1, 2, 3], slot=3), open_request([4], slot=5)], features=[handle(5, 1, 9)]))
    ids = {tuple(tokens): seq_id for seq_id, tokens in method.sequences.items()}
    commits = [DraftCommit(3, 1, 3, [7, 8]), DraftCommit(3, 1, 3, [9])]  # the second one's base_len is not the sequence's length any more
    session.apply(DraftRound(1, 0, 2, commits=commits, features=[handle(3, 1, 4, 6), handle(3, 2, 5), handle(6, 1)]))
    assert method.features.heard == [("note", ids[4,], [9]), ("grew", ids[1, 2, 3], 4), ("note", ids[1, 2, 3], [4, 6])]
    session.apply(DraftRound(1, 0, 3, closes=[SlotRef(3, 1)], features=[handle(3, 1, 5)]))
    assert len(method.features.heard) == 3, "of a slot that is closed"


def test_sequences_that_are_not_drafted_for_hear_nothing(method):
    session = Session("s", method, SequencePool(1))
    session.apply(DraftRound(1, 0, 1, opens=[open_request([1], slot=0), open_request([2], slot=1)], features=[handle(1, 1, 9)]))
    session.apply(DraftRound(1, 0, 2, commits=[DraftCommit(1, 1, 1, [7])]))
    assert method.features.heard == []


def test_a_method_without_a_head_needs_none_of_it():
    session = Session("s", ScriptedMethod(), SequencePool(1))
    session.apply(DraftRound(1, 0, 1, opens=[open_request([1], slot=0)], commits=[DraftCommit(0, 1, 1, [7])], features=[handle(0, 1, 9)]))
    assert session.num_slots == 1
