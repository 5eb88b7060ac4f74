"""What drafts were drawn from, on its way from drafters to a verifier."""

import numpy as np
import pytest

from specwire.errors import InvalidArgumentError
from specwire.messages import Proposals
from specwire.proposals import RowProposals, join_proposals, split_proposals, what_is_wrong


def test_rows_of_several_drafters_are_joined_and_split_again() -> None:
    wide = RowProposals(np.array([[4, 5, 6], [7, 8, 9]], dtype=np.int32), np.array([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]], dtype=np.float32))
    narrow = RowProposals(np.array([[1, 2]], dtype=np.int32), np.array([[0.5, 0.5]], dtype=np.float32))
    rows = [([5, 7], wide), ([], None), ([3, 3], None), ([2], narrow)]
    joined = join_proposals(rows)
    assert joined is not None
    assert (joined.num_candidates, len(joined.token_ids)) == (3, 15)
    split = split_proposals(joined, [drafts for drafts, _ in rows])
    assert split[1] is None
    for (drafts, _), own in zip(rows, split, strict=True):
        assert own is None or what_is_wrong(drafts, own, 10) == ""
    looked_up = split[2]
    assert looked_up is not None
    np.testing.assert_array_equal(looked_up.probs, [[1.0, 0.0, 0.0]] * 2)
    np.testing.assert_array_equal(looked_up.token_ids[:, 0], [3, 3])


def test_rows_that_were_not_drawn_send_nothing() -> None:
    assert join_proposals([([3, 4], None), ([], None)]) is None
    drawn = RowProposals(np.array([[4]], dtype=np.int32), np.array([[1.0]], dtype=np.float32))
    assert join_proposals([([], drawn.first(0)), ([5], None)]) is None


@pytest.mark.parametrize("proposals", [Proposals(2, [1, 2], [1.0]), Proposals(1, [], []), Proposals(0, [], []), Proposals(40, [1] * 40, [0.0] * 40)])
def test_wrong_lengths_are_refused(proposals: Proposals) -> None:
    with pytest.raises(InvalidArgumentError, match="send"):
        split_proposals(proposals, [[1]])
