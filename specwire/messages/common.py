"""What rounds of every kind share."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class RowStatus(IntEnum):
    """What became of one row of a round (types.proto)."""

    OK = 1
    STALE = 2
    OUT_OF_BLOCKS = 3
    BAD = 4
    CATCHING_UP = 5


class FinishReason(IntEnum):
    """Why a choice ended (types.proto)."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4

    @property
    def label(self) -> str:
        """The name that clients see: stop, length, cancelled, error."""
        return self.name.lower()


class TokenOrigin(IntEnum):
    """Where an emitted token came from (coordinator.proto)."""

    PLAIN = 1
    ACCEPTED = 2
    RECOVERED = 3
    BONUS = 4


class SlotRef(NamedTuple):
    """A slot in one of its lives: epochs ascend with each Open of the slot."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opens a Verify or Draft stream."""

    coordinator_id: str
    incarnation: int
    max_outstanding_rounds: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The peer's first reply."""

    instance_id: str
    max_outstanding_rounds: int
    free_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """Unix nanoseconds at the answering service."""

    received_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    sent_ns: int = 0


NO_TIMING = RoundTiming()
"""Times of a message that has none."""


@dataclass(frozen=True, slots=True)
class FeatureHandle:
    """Where a drafter finds a sequence's features; see types.proto."""

    session: int
    slot: int
    epoch: int
    feature_set_hash: str
    source: str
    new_block_ids: list[int]
    first_position: int
    num_positions: int
    generation: int
    place: int
    address: str = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Draft distributions for the ratio test: token_ids and probs are [sum of num_drafts x num_candidates], row-major."""

    num_candidates: int
    token_ids: list[int]
    probs: list[float]


class ConditionalOutcome(NamedTuple):
    """Drafts for one possible outcome (num_accepted, next_token) of the parent round."""

    num_accepted: int
    next_token: int
    draft_tokens: list[int]
    confidences: list[float]


@dataclass(frozen=True, slots=True)
class LogitOverlay:
    """Ids masked at one position of one row's segment (position 0 is its first token)."""

    row: int
    position: int
    masked_token_ids: list[int]
    grammar_bitmask: bytes = b""
