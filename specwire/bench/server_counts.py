"""The coordinator's own counters beside the sums of what it told its clients: two ways to one number."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from specwire.bench.metrics import add_stats
from specwire.bench.record import RequestRecord
from specwire.messages import CoordinatorStatus


@dataclass(frozen=True, slots=True)
class Counts:
    """What both sides count. Of the coordinator they are everybody's: other clients' requests and those that were cut off count too."""

    requests: int
    prompt_tokens: int
    generated_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    preemptions: int

    @classmethod
    def of_status(cls, before: CoordinatorStatus, after: CoordinatorStatus) -> "Counts":
        """What the coordinator has counted between two looks at it."""
        earlier = before.accepted_per_position + (0,) * (len(after.accepted_per_position) - len(before.accepted_per_position))
        return cls(
            after.num_requests_ended - before.num_requests_ended,
            after.num_prompt_tokens - before.num_prompt_tokens,
            after.num_generated_tokens - before.num_generated_tokens,
            after.num_drafts - before.num_drafts,
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
            _without_zeros([late - early for late, early in zip(after.accepted_per_position, earlier, strict=True)]),
            after.num_preemptions - before.num_preemptions,
        )

    @classmethod
    def of_records(cls, records: Sequence[RequestRecord]) -> "Counts":
        """What the coordinator told the clients of these requests, those that it never admitted left out."""
        told = [record for record in records if record.spec is not None]
        total = add_stats([record.spec for record in told if record.spec is not None])
        return cls(
            len(told),
            sum(record.num_prompt_tokens for record in told),
            sum(record.num_output_tokens for record in told),
            total.num_drafts,
            total.num_draft_tokens,
            total.num_accepted_tokens,
            _without_zeros(total.accepted_per_position),
            total.num_preemptions,
        )

    def differences(self, other: "Counts") -> list[tuple[str, str, str]]:
        """(name, this one, the other one) of what is not equal."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [(name.replace("_", " "), str(mine), str(theirs)) for name, mine, theirs in pairs if mine != theirs]


def _without_zeros(counts: Sequence[int]) -> tuple[int, ...]:
    """The two sides may know different K: positions at which nothing was ever accepted are left out at the end."""
    last = max((index for index, count in enumerate(counts) if count), default=-1)
    return tuple(counts[: last + 1])
