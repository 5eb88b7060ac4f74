"""Every span that the services emit, as data: docs/tracing.md shows this table, and tests hold both the documentation and the spans to it."""

from dataclasses import dataclass

INTERNAL, SERVER, CLIENT = "internal", "server", "client"
"""Kinds of spans, as OpenTelemetry names them."""
SERVICE_PREFIX = "specwire-"
"""service.name is this and coordinator, verifier, drafter or http."""


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """What spans of one name are.

    Args:
        service: the one that emits them.
        parents: names of spans that they may be children of.
        is_entry: they may also be the root of a trace, or the child of a client's span.
        text: what they cover.
        attributes: that every one of them has, with their meaning.
        optional: attributes that only some have.
        links: name of the spans in other traces that they link to.
        events: that they may have, each with its attributes.
    """

    name: str
    service: str
    kind: str
    parents: tuple[str, ...]
    text: str
    attributes: dict[str, str]
    optional: dict[str, str]
    links: str = ""
    events: dict[str, tuple[str, ...]] | None = None
    is_entry: bool = False


_CHOICE = {"specwire.choice": "which of the request's n choices"}
_LANE = {"specwire.lane": "number of the coordinator's lane"}
_ROUND = {"specwire.round": "number of the round in its stream"}
_DISCARDED = {"specwire.discarded": "true: the result was not used, since the sequence had ended, or had lost its place"}

SPANS = (
    SpanSpec(
        "http",
        "http",
        SERVER,
        (),
        "a request for a generation over HTTP, from its head to the end of its answer",
        {
            "specwire.request_id": "id of the answer, with which the coordinator's label begins",
            "specwire.path": "what was asked for",
            "specwire.is_streamed": "whether the answer is a stream",
        },
        {},
        is_entry=True,
    ),
    SpanSpec(
        "generate",
        "coordinator",
        SERVER,
        ("http",),
        "a request, from its admission to the end of its last choice",
        {
            "specwire.request_id": "the client's label",
            "specwire.num_choices": "n",
            "specwire.num_prompt_tokens": "tokens of the prompt",
            "specwire.num_generated_tokens": "emitted tokens, over all choices",
            "specwire.num_cached_tokens": "prompt tokens found in the prefix cache, over all choices",
            "specwire.num_steps": "rows that emitted tokens, over all choices",
            "specwire.num_draft_tokens": "verified draft tokens, over all choices",
            "specwire.num_accepted_tokens": "accepted draft tokens, over all choices",
            "specwire.num_preemptions": "times that a choice was preempted",
            "specwire.finish_reasons": "stop, length, cancelled or error, in the order in which the choices ended",
        },
        {
            "specwire.time_to_first_token_ms": "from admission to the first token; of requests that got one",
            "specwire.prompt_token_ids": "the prompt; only with trace_content",
            "specwire.generated_token_ids": "the output of all choices, one after the other; only with trace_content",
        },
        is_entry=True,
    ),
    SpanSpec(
        "queue",
        "coordinator",
        INTERNAL,
        ("generate",),
        "waiting for a place at a verifier; again after a choice has lost its place",
        _CHOICE,
        {},
    ),
    SpanSpec(
        "prefill",
        "coordinator",
        INTERNAL,
        ("generate",),
        "from getting a place to the first token from there",
        _CHOICE | _LANE | {"specwire.num_tokens": "tokens to compute, cached ones included"},
        {},
    ),
    SpanSpec(
        "step",
        "coordinator",
        INTERNAL,
        ("generate",),
        "a step with a row of the choice, from its plan to its commit; a sample of all",
        _CHOICE | _LANE | {"specwire.step": "number of the step among those of the choice, from 1"},
        _DISCARDED
        | {
            "specwire.num_rows": "sequences in the step",
            "specwire.num_speculative_tokens": "K of the step",
            "specwire.num_tokens": "tokens that the row emitted; 0 of a prefill chunk that is not the last",
        },
        links="generate",
    ),
    SpanSpec(
        "propose",
        "coordinator",
        CLIENT,
        ("step",),
        "waiting for drafts",
        _CHOICE | {"specwire.drafter": "address", "specwire.num_asked_tokens": "most drafts wanted"},
        {"specwire.num_draft_tokens": "drafts that came and were kept"},
        events={"fallback": ("specwire.cause",)},
    ),
    SpanSpec(
        "draft",
        "drafter",
        SERVER,
        ("propose",),
        "drafting for all rows of the round that the proposal was part of",
        _LANE
        | _ROUND
        | {
            "specwire.num_rows": "sequences in the round",
            "specwire.wait_ms": "from the round's arrival to the start of the span",
        },
        {"specwire.num_draft_tokens": "drafts, over all rows", "specwire.num_rows_catching_up": "rows whose prompt the drafter still computes"},
    ),
    SpanSpec(
        "features",
        "drafter",
        INTERNAL,
        ("propose",),
        "reading the target's features that the round's drafts are made of, from the first verifier's to the last one's; inside of draft",
        _LANE
        | _ROUND
        | {
            "specwire.num_rows": "sequences in the round",
            "specwire.wait_ms": "from the round's arrival to the start of the span",
            "specwire.num_bytes": "bytes that were read",
        },
        {},
    ),
    SpanSpec(
        "verify",
        "coordinator",
        CLIENT,
        ("step",),
        "a round, from its sending to its answer",
        _CHOICE | _ROUND | {"specwire.verifier": "address", "specwire.num_draft_tokens": "drafts of the row"},
        {
            "specwire.num_accepted_tokens": "accepted drafts of the row",
            "specwire.row_status": "OK, STALE, OUT_OF_BLOCKS or BAD",
        },
    ),
    SpanSpec(
        "forward",
        "verifier",
        SERVER,
        ("verify",),
        "running the round on the target model, sampling included; from when the round before it is done",
        _LANE
        | _ROUND
        | {
            "specwire.num_rows": "rows of the round",
            "specwire.wait_ms": "from the round's arrival to the start of the span",
        },
        {"specwire.num_tokens": "tokens that the model computed, padding included", "specwire.num_free_blocks": "free KV blocks after it"},
    ),
)

BY_NAME = {spec.name: spec for spec in SPANS}
