"""Rounds between coordinator and drafter."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.messages.common import NO_TIMING, ConditionalOutcome, FeatureHandle, Hello, Proposals, RoundTiming, RowStatus, SlotRef, Welcome
from specwire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Starts a sequence in a drafter slot with all its tokens so far."""

    slot: int
    epoch: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    noise_key: int
    choice: int = 0
    tenant_cache_key: bytes = b""
    variant: str = ""
    request_id: str = ""


class DraftCommit(NamedTuple):
    """Tokens appended to a sequence that had base_len tokens."""

    slot: int
    epoch: int
    base_len: int
    token_ids: list[int]


class DraftRow(NamedTuple):
    """Asks for up to num_drafts tokens that follow the sequence's base_len tokens."""

    slot: int
    epoch: int
    base_len: int
    num_drafts: int
    parent_round: int = 0


@dataclass(frozen=True, slots=True)
class DraftRound:
    """One round to a drafter: closes, then opens, then commits, then rows. Without rows it is not answered."""

    session: int
    lane: int
    round: int
    closes: list[SlotRef] = field(default_factory=list)
    opens: list[DraftOpen] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)
    features: list[FeatureHandle] = field(default_factory=list)
    rows: list[DraftRow] = field(default_factory=list)
    hello: Hello | None = None
    traceparents: tuple[str, ...] = ()
    sent_ns: int = 0


_NO_SCORES = array("f")
"""Never written."""


class DraftRowResult(NamedTuple):
    """Drafts for one sequence; fresh iff (epoch, base_len) match it now. confidences are raw scores in [0, 1] as 32-bit floats (typecode f), one for
    each draft, NaN for one without; or none at all."""

    status: RowStatus
    slot: int
    epoch: int
    base_len: int
    draft_tokens: list[int] = []  # noqa: RUF012 - never written
    confidences: "array[float]" = _NO_SCORES
    error: str = ""


@dataclass(frozen=True, slots=True)
class DraftResult:
    """The answer to one DraftRound; round 0 marks an unsolicited reply."""

    session: int
    lane: int
    round: int
    rows: list[DraftRowResult] = field(default_factory=list)
    proposals: Proposals | None = None
    conditional: list[list[ConditionalOutcome]] | None = None
    timing: RoundTiming = NO_TIMING
    welcome: Welcome | None = None
    draining: bool = False
