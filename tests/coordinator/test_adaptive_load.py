"""Adaptive verification in the coordinator's own steps, in virtual time: an H200's costs, and time that no part of a step shows."""

import pytest

from tests.coordinator.virtual_lane import Costs, K, Overhead, VirtualLane

VERIFY = ((1, 4.0), (8, 4.1), (32, 4.5), (64, 5.2), (128, 7.0), (256, 11.5), (384, 12.5), (512, 13.5), (1024, 16.5), (1536, 21.0), (2048, 26.0))
"""An 8b model's rounds."""
DRAFT = ((2, 0.6), (64, 0.8), (256, 1.0), (1024, 2.2), (2048, 3.5))
"""One pass of one layer and the head."""


def by_rows_and_tokens(num_rows: int, num_tokens: int) -> float:
    """About what steps of fixed K took there beyond verifier, drafter and a hop."""
    return 3.5 + 0.03 * num_rows + 0.012 * num_tokens * num_rows / 256


def test_a_lone_probe_counts_with_what_follows_its_commit() -> None:
    """Rounds of 128 rows, behind whose commit each step in lockstep takes more than half of what its parts take."""
    policy = VirtualLane(Costs(VERIFY, DRAFT, by_rows_and_tokens), 128, None).throughput(800, 100)[1]
    assert policy is not None
    counters = policy.policy.counters
    assert sum(counters.requested[1:]) <= 2 * counters.num_probes, "hardly any other step drafts"
    assert policy.cost.clock.lockstep.at(128) > 1.2


@pytest.mark.parametrize(
    ("num_sequences", "overhead", "num_settle", "num_tokens"),
    [
        (1, lambda rows, tokens: 3.0, 1000, 1000),
        (16, lambda rows, tokens: 5.0, 400, 400),
        (64, by_rows_and_tokens, 1500, 600),
        (128, by_rows_and_tokens, 1000, 400),
    ],
)
def test_what_no_part_shows(num_sequences: int, overhead: Overhead, num_settle: int, num_tokens: int) -> None:
    """All drafts are accepted at .8. Of the last two none at all is best, or nearly so, which has to be found out first."""
    costs = Costs(VERIFY, DRAFT, overhead)
    fixed = [VirtualLane(costs, num_sequences, k).throughput(20, 50)[0] for k in (0, 3, 5, K)]
    reached, policy = VirtualLane(costs, num_sequences, None).throughput(num_settle, num_tokens)
    assert reached >= 0.98 * max(fixed)
    assert policy is not None
    assert policy.cost.clock.errors.median <= 0.05
    assert policy.cost.clock.lockstep.at(num_sequences * K) > 1.1
