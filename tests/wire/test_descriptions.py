"""What peers say of themselves is taken only if it can be so."""

import dataclasses
from typing import Any

import pytest

from specwire.errors import InvalidArgumentError
from specwire.messages import DraftCost, ServiceDescription, VerifyCost
from specwire.wire.describe import pack_description, unpack_description

GOOD = ServiceDescription(
    "model", "one", 1000, 512, 8, max_num_seqs=16, num_blocks=10, block_size=16, max_num_batched_tokens=64,
    verify_cost=VerifyCost((1, 8), (2.0, 3.0), 0.5, 0.25, 8, 8, (16, 32), (4.0, 5.0)), draft_cost=(DraftCost(1, 1, 0.0), DraftCost(4, 16, 2.0)),
    draft_ms_per_kv_token=0.5, draft_chunk_ms=1.5,
)  # fmt: skip


def test_a_good_one_comes_through() -> None:
    assert unpack_description(pack_description(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_draft_tokens": -1}, "max_num_draft_tokens -1, but it must be from 0 to 2147483647"),
        ({"block_size": -16}, "block_size -16"),
        ({"max_num_seqs": 2**31 - 1}, "max_num_seqs 2147483647, but it must be from 0 to 100000"),
        ({"verify_cost": VerifyCost((0,), (0.0,))}, r"verify_cost is of \[0\] tokens, but these must rise from 1 on"),
        ({"verify_cost": VerifyCost((8, 8), (1.0, 1.0))}, r"verify_cost is of \[8, 8\] tokens"),
        ({"verify_cost": VerifyCost((), (), 0.0, 0.0, 0, 0, (4, 2), (1.0, 1.0))}, r"verify_cost is of \[4, 2\] tokens"),
        ({"verify_cost": VerifyCost((1, 8), (1.0, float("nan")))}, "verify_cost has nan"),
        ({"verify_cost": VerifyCost((1, 8), (1.0, float("inf")))}, "verify_cost has inf"),
        ({"verify_cost": VerifyCost((1, 8), (1.0, 2.0), -1.0)}, "verify_cost has -1"),
        ({"draft_cost": (DraftCost(1, 1, float("inf")),)}, "draft_cost has inf"),
        ({"draft_cost": (DraftCost(-1, 1, 1.0),)}, "draft_cost has -1"),
        ({"draft_chunk_ms": float("inf")}, "draft_cost has inf"),
        ({"draft_ms_per_kv_token": float("nan")}, "draft_cost has nan"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        unpack_description(pack_description(dataclasses.replace(GOOD, **changes)))
