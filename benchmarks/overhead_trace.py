"""What the processes of benchmarks.overhead tell each other in files."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Received(NamedTuple):
    """One round as a peer got it."""

    received_ns: int
    cpu_ns: int
    """What the process under test had used until then."""
    message: Any
    """VerifyRound or DraftRound."""


class Hop(NamedTuple):
    """One round trip, seen from the coordinator."""

    sent_ns: int
    round_trip_ns: int
    service_ns: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class EchoStep:
    """What the process under test sent in one step, serialised; `is_answered` belongs to draft_requests."""

    draft_requests: list[bytes]
    is_answered: list[bool]
    verify_request: bytes
    session_responses: list[bytes]


@dataclass(frozen=True, slots=True)
class EchoScript:
    """A whole run."""

    draft_hello: bytes
    verify_hello: bytes
    steps: list[EchoStep]
