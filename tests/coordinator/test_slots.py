"""A slot's books: what is in flight, and what is certain to come."""

from typing import Any

import pytest

from coordinator.slots import Slot, decode_rows
from specwire.messages import VerifyRow


class FakeSequence:
    """As much of a sequence as a slot looks at."""

    def __init__(self, num_tokens: int) -> None:
        self.token_ids = list(range(num_tokens))


def make_slot(num_tokens: int = 100) -> Slot:
    lane: Any = None
    sequence: Any = FakeSequence(num_tokens)
    return Slot(lane, 3, 7, sequence)


def decode_row(slot: Slot, round_: int, drafts: list[int]) -> VerifyRow:
    (row,) = decode_rows([slot], [drafts], round_)
    return row


def test_the_only_chunk_that_covers_all_is_certain_to_sample() -> None:
    slot = make_slot()
    assert slot.chunk_row(1, 100) == VerifyRow(3, 7, 0, 100)
    assert (slot.num_ahead, slot.num_remaining_tokens) == (1, 0)
    assert decode_row(slot, 2, []) == VerifyRow(3, 7, 1, 0, 101, -1, 1)
    assert slot.num_ahead == 2


def test_a_chunk_behind_another_is_not_certain() -> None:
    """The first one may find cached tokens, reach the end and sample itself."""
    slot = make_slot()
    slot.chunk_row(1, 60)
    slot.chunk_row(2, 40)
    assert (slot.num_ahead, slot.num_remaining_tokens, slot.num_in_flight) == (0, 0, 2)
    slot.num_in_flight -= 1
    slot.chunk_answered(60, 60)
    assert slot.num_ahead == 1, "the first one did not sample, so the second will"
    assert decode_row(slot, 3, []).from_round == 2
    slot.num_in_flight -= 1
    slot.chunk_answered(40, 100)
    assert slot.num_ahead == 1


def test_an_early_chunk_that_samples_leaves_nothing_certain() -> None:
    slot = make_slot()
    slot.chunk_row(1, 60)
    slot.chunk_row(2, 40)
    slot.chunk_answered(60, 100)
    assert slot.num_ahead == 0
    slot.sequence.token_ids.append(100)
    assert decode_row(slot, 3, []) == VerifyRow(3, 7, 2, 0, 101, 100, 0), "its first token is known, its parent is the chunk with nothing to do"
    slot.chunk_answered(40, 100)
    assert slot.num_ahead == 1


def test_a_chunk_that_covers_a_part_is_not_certain() -> None:
    slot = make_slot()
    slot.chunk_row(1, 99)
    assert (slot.num_ahead, slot.num_remaining_tokens) == (0, 1)


def test_a_row_with_drafts_is_never_followed() -> None:
    slot = make_slot()
    slot.chunk_row(1, 100)
    slot.chunk_answered(100, 100)
    slot.sequence.token_ids.append(100)
    assert decode_row(slot, 2, [1, 2]) == VerifyRow(3, 7, 1, 0, 101, 100, 0, [1, 2])
    assert slot.num_ahead == 0


def test_drafts_need_known_tokens() -> None:
    slot = make_slot()
    slot.chunk_row(1, 100)
    with pytest.raises(AssertionError, match="1 drafts after 1 tokens"):
        decode_row(slot, 2, [5])


def test_after_a_failure_the_last_row_that_ran_is_the_parent() -> None:
    slot = make_slot()
    slot.chunk_row(1, 60)
    slot.chunk_row(2, 40)
    for budget, computed in ((60, 60), (40, 0)):
        slot.num_in_flight -= 1
        slot.chunk_answered(budget, computed)
    slot.last_ran_round, slot.has_failed = 1, True
    slot.resume()
    assert (slot.parent_round, slot.num_remaining_tokens, slot.num_ahead) == (1, 40, 0)
    assert slot.chunk_row(5, 40) == VerifyRow(3, 7, 1, 40)
