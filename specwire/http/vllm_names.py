"""vLLM's names for what there is here too, so that dashboards that know them work. What has no equal here is left out."""

from collections.abc import Iterator, Sequence

from specwire.http import metrics as own
from specwire.messages import CoordinatorStatus
from specwire.metrics import Kind, Metric, Sample

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_PREFIX = "vllm:"


def _metric(kind: Kind, name: str, text: str, *labels: str) -> Metric:
    return Metric(f"{_PREFIX}{name}{'_total' if kind is Kind.COUNTER else ''}", kind, text, (*_LABELS, *labels))


RUNNING = _metric(Kind.GAUGE, "num_requests_running", "sequences that verifiers run")
WAITING = _metric(Kind.GAUGE, "num_requests_waiting", "sequences in the queue")
KV_USAGE = _metric(Kind.GAUGE, "kv_cache_usage_perc", "share of all KV blocks that can't be taken")
PREEMPTIONS = _metric(Kind.COUNTER, "num_preemptions", "sequences that lost their place")
PROMPT_TOKENS = _metric(Kind.COUNTER, "prompt_tokens", "prompt tokens of admitted requests")
GENERATION_TOKENS = _metric(Kind.COUNTER, "generation_tokens", "generated tokens")
SUCCESS = _metric(Kind.COUNTER, "request_success", "ended sequences", "finished_reason")
DRAFTS = _metric(Kind.COUNTER, "spec_decode_num_drafts", "verifications with at least one draft token")
DRAFT_TOKENS = _metric(Kind.COUNTER, "spec_decode_num_draft_tokens", "verified draft tokens")
ACCEPTED_TOKENS = _metric(Kind.COUNTER, "spec_decode_num_accepted_tokens", "accepted draft tokens")
ACCEPTED_AT = _metric(Kind.COUNTER, "spec_decode_num_accepted_tokens_per_pos", "drafts accepted at this position", "position")
_OWN = {
    own.LOOKED_UP_TOKENS.name: _metric(Kind.COUNTER, "prefix_cache_queries", "prompt tokens of choices through this front end"),
    own.CACHED_TOKENS.name: _metric(Kind.COUNTER, "prefix_cache_hits", "those that the verifier's prefix cache had"),
    own.TIME_TO_FIRST_TOKEN.name: _metric(Kind.HISTOGRAM, "time_to_first_token_seconds", "of streams through this front end"),
    own.INTER_TOKEN_LATENCY.name: _metric(Kind.HISTOGRAM, "inter_token_latency_seconds", "of streams through this front end"),
    own.TIME_PER_TOKEN.name: _metric(Kind.HISTOGRAM, "request_time_per_output_token_seconds", "of streams through this front end"),
    own.DECODE.name: _metric(Kind.HISTOGRAM, "request_decode_time_seconds", "of streams through this front end"),
    own.GENERATION.name: _metric(Kind.HISTOGRAM, "e2e_request_latency_seconds", "of requests through this front end"),
    own.PROMPT_LENGTH.name: _metric(Kind.HISTOGRAM, "request_prompt_tokens", "of requests through this front end"),
    own.CHOICE_LENGTH.name: _metric(Kind.HISTOGRAM, "request_generation_tokens", "of choices through this front end"),
}
"""What the front end measures itself, by its own name."""
VLLM_METRICS = (
    RUNNING, WAITING, KV_USAGE, PREEMPTIONS, PROMPT_TOKENS, GENERATION_TOKENS, SUCCESS, DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS, ACCEPTED_AT,
    *_OWN.values(),
)  # fmt: skip
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""vLLM's for ours."""


def vllm_samples(status: CoordinatorStatus, samples: Sequence[Sample], model_name: str) -> Iterator[Sample]:
    """The coordinator's numbers, and what the front end has measured.

    Args:
        samples: the front end's own.
        model_name: what the model is called.
    """
    labels = (model_name, _ENGINE)
    num_blocks = sum(lane.num_blocks for lane in status.lanes)
    num_free = sum(lane.num_free_blocks for lane in status.lanes)
    for metric, value in (
        (RUNNING, sum(lane.num_running for lane in status.lanes)),
        (WAITING, status.num_waiting),
        (KV_USAGE, 1 - num_free / num_blocks if num_blocks else 0.0),
        (PREEMPTIONS, status.num_preemptions),
        (PROMPT_TOKENS, status.num_prompt_tokens),
        (GENERATION_TOKENS, status.num_generated_tokens),
        (DRAFTS, status.num_drafts),
        (DRAFT_TOKENS, status.num_draft_tokens),
        (ACCEPTED_TOKENS, status.num_accepted_tokens),
    ):
        yield Sample(metric, labels, value)
    for reason, name in _REASONS.items():
        yield Sample(SUCCESS, (*labels, name), status.sequences_by_reason.get(reason, 0))
    for position, number in enumerate(status.accepted_per_position):
        yield Sample(ACCEPTED_AT, (*labels, str(position)), number)
    for sample in samples:
        if sample.metric.name in _OWN:
            yield Sample(_OWN[sample.metric.name], labels, sample.value)
