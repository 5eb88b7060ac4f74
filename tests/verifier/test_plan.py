"""Rows that are planned the short way are planned as the long way would."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specwire.messages import VerifyRow
from verifier_svc.plan import Segment, depends_on_unread, plan_common_row, plan_row
from verifier_svc.slots import Slot, VerifierLimits

LIMITS = VerifierLimits(vocab_size=10, max_model_len=9, max_num_seqs=4, max_num_draft_tokens=2, max_num_batched_tokens=64)
TOKENS = [3, 4, 5, 6]


def make_slot(**state: object) -> Slot:
    """Four tokens, three of them opened and computed, the last one sampled in round 7."""
    values: dict = {"token_ids": list(TOKENS), "num_opened_tokens": 3, "num_computed_tokens": 3, "num_launched_tokens": 3, "last_round": 7}
    return Slot(slot=1, epoch=1, sampling=None, **(values | state))


def run_ahead(**state: object) -> Slot:
    """One more token is sampled by an unread round 8."""
    return make_slot(**({"num_launched_tokens": 4, "num_unread_rows": 1, "num_unread_tokens": 1, "last_round": 8} | state))


@pytest.mark.parametrize(
    ("slot", "row", "segment"),
    [
        (make_slot(), VerifyRow(1, 1, 7, 0, 4, 6), (3, 1, [], True, False)),
        (make_slot(), VerifyRow(1, 1, 7, 0, 4, 6, 0, [1, 9]), (3, 1, [1, 9], True, False)),
        (make_slot(), VerifyRow(1, 1, 7, 0, 4, -1, 7), (3, 1, [], True, False)),
        (run_ahead(), VerifyRow(1, 1, 8, 0, 5, -1, 8), (4, 1, [], True, True)),
    ],
)
def test_common_rows(slot: Slot, row: VerifyRow, segment: tuple) -> None:
    assert plan_common_row(slot, row, LIMITS) == Segment(slot, *segment) == plan_row(slot, row, LIMITS)


slots = st.builds(
    make_slot,
    num_launched_tokens=st.sampled_from([2, 3, 3, 4, 4, 5]),
    num_opened_tokens=st.sampled_from([3, 3, 4, 5]),
    num_unread_rows=st.integers(0, 2),
    num_unread_tokens=st.integers(0, 2),
    last_round=st.sampled_from([7, 8]),
    last_num_drafts=st.sampled_from([0, 0, 0, 1]),
    runs_ahead=st.sampled_from([True, True, False]),
    keeps_history=st.sampled_from([False, False, True]),
    error=st.sampled_from(["", "", "", "it went bad"]),
)
rows = st.builds(
    VerifyRow,
    slot=st.just(1),
    epoch=st.sampled_from([1, 1, 1, 2]),
    parent_round=st.sampled_from([7, 8]),
    token_budget=st.sampled_from([0, 0, 0, 1]),
    base_len=st.sampled_from([4, 5, 5, 6, 9]),
    first_token=st.sampled_from([-1, 6, 6, 2]),
    from_round=st.sampled_from([0, 0, 7, 8]),
    draft_tokens=st.lists(st.integers(-1, 10), max_size=3),
)


@given(slots, rows)
@example(make_slot(last_num_drafts=2), VerifyRow(1, 1, 7, 0, 4, -1, 7))
@example(run_ahead(keeps_history=True), VerifyRow(1, 1, 8, 0, 5, -1, 8))
@example(run_ahead(runs_ahead=False), VerifyRow(1, 1, 8, 0, 5, -1, 8))
@example(make_slot(num_launched_tokens=4, num_opened_tokens=5, num_unread_tokens=1), VerifyRow(1, 1, 7, 0, 5, -1, 7))
def test_the_short_way_says_what_the_long_way_says_or_nothing(slot: Slot, row: VerifyRow) -> None:
    segment = plan_common_row(slot, row, LIMITS)
    if segment is not None:
        assert (row.epoch, row.parent_round, slot.error) == (slot.epoch, slot.last_round, "")
        assert not depends_on_unread(slot, row)
        assert plan_row(slot, row, LIMITS) == segment
