"""The messages that services exchange, as plain Python: protobuf stops at wire.py.

Rows are named tuples, since a step makes hundreds of them; everything else is a frozen slots dataclass.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from specwire.sampling_params import SamplingParams


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


# --- verifier -------------------------------------------------------------------------------------------------------


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
    traceparent: str = ""
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
    """The answer to one VerifyRound; rows in its order."""

    session: int
    lane: int
    round: int
    rows: list[VerifyRowResult] = field(default_factory=list)
    free_blocks: int = 0
    promised_blocks: int = 0
    num_padded_tokens: int = 0
    features: list[FeatureHandle] = field(default_factory=list)
    chosen_outcomes: list[int] = field(default_factory=list)
    timing: RoundTiming = RoundTiming()
    welcome: Welcome | None = None
    traceparent: str = ""


# --- drafter --------------------------------------------------------------------------------------------------------


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
    traceparent: str = ""
    sent_ns: int = 0


class DraftRowResult(NamedTuple):
    """Drafts for one sequence; fresh iff (epoch, base_len) match it now. confidences are raw scores in [0, 1]."""

    status: RowStatus
    slot: int
    epoch: int
    base_len: int
    draft_tokens: list[int] = []  # noqa: RUF012 - never written
    confidences: list[float] = []  # noqa: RUF012 - never written
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
    timing: RoundTiming = RoundTiming()
    welcome: Welcome | None = None
    traceparent: str = ""


# --- descriptions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Projected hidden states that a verifier keeps for draft heads."""

    name: str
    hash: str
    layer_ids: tuple[int, ...]
    width: int
    dtype: str


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """Milliseconds of a verify step: step_ms at each of num_tokens (ascending), plus linear terms."""

    num_tokens: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()
    ms_per_kv_token: float = 0.0
    ms_per_row: float = 0.0
    max_graph_tokens: int = 0


class DraftCost(NamedTuple):
    """Milliseconds of one draft call for num_sequences sequences of K = num_draft_tokens."""

    num_draft_tokens: int
    num_sequences: int
    draft_ms: float


@dataclass(frozen=True, slots=True)
class ServiceDescription:
    """What a verifier or drafter is and can hold. An empty tokenizer_fingerprint means that it has no tokenizer; a drafter
    with vocab_size 0 works on any token ids."""

    model_id: str
    instance_id: str
    vocab_size: int
    max_model_len: int
    max_num_draft_tokens: int
    max_num_seqs: int
    weights_hash: str = ""
    tokenizer_fingerprint: str = ""
    dtype: str = ""
    numerics_version: str = ""
    device: str = ""
    block_size: int = 0
    num_blocks: int = 0
    graph_sizes: tuple[int, ...] = ()
    feature_sets: tuple[FeatureSet, ...] = ()
    verify_cost: VerifyCost = VerifyCost()
    draft_cost: tuple[DraftCost, ...] = ()
    build: str = ""
    method: str = ""
    eos_token_ids: tuple[int, ...] = ()
    max_num_batched_tokens: int = 0
    max_message_bytes: int = 0
    use_heterogeneous_vocab: bool = False
    rejection_sample_method: str = "strict"


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer as it travels: everything a client needs to encode, decode and render chats."""

    tokenizer_json: bytes
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    chat_template: str | None = None
    bos_token_id: int | None = None
    add_bos_token: bool = False
    model_id: str = ""
    max_model_len: int = 0


# --- clients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the coordinator takes it."""

    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    request_id: str = ""
    tenant_cache_key: bytes = b""
    variant: str = ""
    synthetic_acceptance_rates: tuple[float, ...] = ()
    timeout_ms: int | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Speculation in the steps of one choice; tokens that a stop rule cut still count as accepted.

    num_drafts counts verifications with at least one draft token (vLLM's definition); acceptance_length = 1 + accepted / drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_steps: int = 0
    num_preemptions: int = 0
    synthetic: bool = False

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification that had drafts, the target's own token included; 1 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """A failure: code is a google.rpc.Code number."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New tokens of one choice. text is set iff the request has stop strings; the last delta of a choice has finish_reason, usage
    and spec_stats. stop_cause is the token id or stop string that fired."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    token_origins: bytes = b""
    text: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_cause: int | str | None = None
    usage: Usage | None = None
    spec_stats: SpecStats | None = None
    error: ErrorStatus | None = None


class StreamDelta(NamedTuple):
    """A plain delta (token ids only) of one choice on a multiplexed session."""

    stream_id: int
    choice_index: int
    token_ids: list[int]
    token_origins: bytes


class SessionEvent(NamedTuple):
    """Anything else that happens to a stream: a delta with more than ids, a failure of the whole request, or its end."""

    stream_id: int
    choice: ChoiceDelta | None = None
    error: ErrorStatus | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """One message of the coordinator to a front end."""

    deltas: list[StreamDelta] = field(default_factory=list)
    events: list[SessionEvent] = field(default_factory=list)


class SessionStart(NamedTuple):
    """A new request under a stream id that the client chose."""

    stream_id: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """One message of a front end to the coordinator."""

    starts: list[SessionStart] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
