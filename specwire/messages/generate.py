"""Requests and replies between clients and the coordinator."""

from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.messages.common import FinishReason
from specwire.messages.verify import TokenLogprobs
from specwire.sampling_params import SamplingParams


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
    report_drafts: bool = False


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
class DraftReport:
    """The verifications with drafts of one choice, in order: how many draft tokens each had and how many were accepted, and all draft tokens'
    confidences as the drafter sent them (NaN where it sent none)."""

    num_draft_tokens: list[int]
    num_accepted_tokens: list[int]
    confidences: list[float]


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """A failure: code is a google.rpc.Code number. retry_after_ms says when to send the request again, if that can help."""

    code: int
    message: str
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New tokens of one choice. text is set iff the request has stop strings; the last delta of a choice has finish_reason, usage,
    spec_stats and, if the request asks for it, draft_report. stop_cause is the token id or stop string that fired."""

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
    draft_report: DraftReport | None = None


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
