"""Rounds between coordinator and verifier."""

from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.messages.common import (
    NO_TIMING,
    ConditionalOutcome,
    FeatureHandle,
    Hello,
    LogitOverlay,
    Proposals,
    RoundTiming,
    RowStatus,
    SlotRef,
    Welcome,
)
from specwire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class VerifyOpen:
    """Starts a sequence in a verifier slot with all its tokens so far (prompt, then committed output)."""

    slot: int
    epoch: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    noise_key: int
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    tenant_cache_key: bytes = b""
    synthetic_acceptance_rates: tuple[float, ...] = ()
    variant: str = ""
    request_id: str = ""


class VerifyRow(NamedTuple):
    """One segment. A prefill row has token_budget > 0 and nothing after it; a decode row has token_budget 0.

    base_len counts the sequence's tokens up to and including the row's first token, whose position is base_len - 1; the token
    sampled after it has index base_len. from_round > 0 means that the first token is the one sampled in that round.
    """

    slot: int
    epoch: int
    parent_round: int
    token_budget: int = 0
    base_len: int = 0
    first_token: int = -1
    from_round: int = 0
    draft_tokens: list[int] = []  # noqa: RUF012 - never written


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """One round to a verifier: closes, then opens, then rows."""

    session: int
    lane: int
    round: int
    closes: list[SlotRef] = field(default_factory=list)
    opens: list[VerifyOpen] = field(default_factory=list)
    rows: list[VerifyRow] = field(default_factory=list)
    overlays: list[LogitOverlay] = field(default_factory=list)
    proposals: Proposals | None = None
    conditional: list[list[ConditionalOutcome]] | None = None
    hello: Hello | None = None
    traceparents: tuple[str, ...] = ()
    sent_ns: int = 0


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one emitted token, from the raw logits: its own, and the best ones as (id, logprob)."""

    sampled: float
    top: list[tuple[int, float]]


class VerifyRowResult(NamedTuple):
    """What a row did. token_ids holds accepted drafts, then the next token; empty where the row had no output."""

    status: RowStatus
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_accepted: int = 0
    token_ids: list[int] = []  # noqa: RUF012 - never written
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The answer to one VerifyRound; rows in its order.

    Args:
        opened_num_cached_tokens: of each of its Opens.
        token_id_range: the least and the largest token id of all rows, as it was found on the wire, so that nobody need go through the rows for them.
    """

    session: int
    lane: int
    round: int
    rows: list[VerifyRowResult] = field(default_factory=list)
    free_blocks: int = 0
    promised_blocks: int = 0
    num_padded_tokens: int = 0
    features: list[FeatureHandle] = field(default_factory=list)
    chosen_outcomes: list[int] = field(default_factory=list)
    timing: RoundTiming = NO_TIMING
    welcome: Welcome | None = None
    draining: bool = False
    opened_num_cached_tokens: list[int] = field(default_factory=list)
    token_id_range: tuple[int, int] = field(default=(0, 0), compare=False)
