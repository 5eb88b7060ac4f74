"""The coordinator's counters beside what clients were told."""

from specwire.bench.record import RequestRecord
from specwire.bench.server_counts import Counts
from specwire.messages import CoordinatorStatus, SpecStats

BEFORE = CoordinatorStatus(
    "1", 5.0, True, num_requests_ended=2, num_prompt_tokens=10, num_generated_tokens=20, num_drafts=3, num_draft_tokens=6, num_accepted_tokens=4,
    accepted_per_position=(3, 1),
)  # fmt: skip
AFTER = CoordinatorStatus(
    "1", 9.0, True, num_requests_ended=4, num_prompt_tokens=18, num_generated_tokens=32, num_drafts=6, num_draft_tokens=13, num_accepted_tokens=8,
    num_preemptions=1, accepted_per_position=(5, 2, 1, 0),
)  # fmt: skip


def records() -> list[RequestRecord]:
    spec = SpecStats(1, 3, 2, (1, 1, 0), num_steps=4), SpecStats(2, 4, 2, (1, 0, 1, 0, 0), num_steps=4, num_preemptions=1)
    told = [RequestRecord(index, 4, 0.0, 0.0, 1.0, [1.0], [6], spec=stats) for index, stats in enumerate(spec)]
    return [*told, RequestRecord(2, 900, 0.0, 0.0, 1.0, error="InvalidArgumentError")]


def test_equal_counts_of_both_sides() -> None:
    clients, server = Counts.of_records(records()), Counts.of_status(BEFORE, AFTER)
    assert clients == server == Counts(2, 8, 12, 3, 7, 4, (2, 1, 1), 1)
    assert clients.differences(server) == []


def test_differences_are_named() -> None:
    assert Counts.of_records(records()[:1]).differences(Counts.of_status(BEFORE, AFTER))[:2] == [("requests", "1", "2"), ("prompt tokens", "4", "8")]


def test_nothing_happened() -> None:
    assert Counts.of_records([]) == Counts.of_status(BEFORE, BEFORE) == Counts(0, 0, 0, 0, 0, 0, (), 0)
