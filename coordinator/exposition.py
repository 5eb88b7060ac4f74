"""The coordinator's metrics by name, and their values now."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate

from specwire.messages import FinishReason, RowStatus
from specwire.metrics import Metric, Sample, make_counter, make_gauge, make_histogram

from .counters import Counters
from .drafters import Drafter
from .engine import Engine
from .exposition_adaptive import ADAPTIVE_METRICS, collect_adaptive
from .exposition_variants import VARIANT_METRICS, collect_variants
from .link import DraftLink
from .metrics import STREAM_KINDS, DrafterMetrics, LaneMetrics, Metrics, StepParts

CAUSES = (
    "no_drafter", "drafter_timeout", "drafter_lost", "catching_up", "garbage",
    *(f"drafter_{status.name.lower()}" for status in (RowStatus.STALE, RowStatus.OUT_OF_BLOCKS, RowStatus.BAD)),
)  # fmt: skip
"""Causes of fallbacks that are shown before they happen."""
REASONS = tuple(reason.label for reason in FinishReason)
FAILURES = ("deadline_exceeded", "unavailable")
KEY_CAUSES = ("no_key", "unknown_key", "expired_key", "over_limit")
REFUSALS = ("invalid_argument", "failed_precondition", "resource_exhausted", "unavailable", "unimplemented", "unauthenticated")
"""The same of ended sequences, failed requests, API keys and refused requests."""

_counter, _gauge, _histogram = partial(make_counter, "coordinator"), partial(make_gauge, "coordinator"), partial(make_histogram, "coordinator")
COUNTS = {
    f"num_{what}": _counter(what, text)
    for what, text in (
        ("rounds", "rounds sent to verifiers"),
        ("rows", "rows of those rounds"),
        ("unbounded_rounds", "rounds with prefill chunks beside decodes that nothing bounds: the verifier has no cost table"),
        ("stale_rows", "rows that a verifier answered STALE"),
        ("bad_rows", "rows that a verifier answered BAD: their requests ended with an error"),
        ("rows_out_of_blocks", "rows that found no KV blocks"),
        ("dropped_rows", "answered rows whose sequence had ended or was opened anew"),
        ("preemptions", "sequences that lost their place for want of KV blocks, or to a more important request"),
        ("pauses", "sequences that gave their place to others because their clients do not read"),
        ("verifier_losses", "verifiers that went away without notice"),
        ("verifier_timeouts", "those of the losses that did not answer a round any more, though the connection held"),
        ("verifier_refusals", "attempts to use a verifier that does not match, or that somebody else holds"),
        ("handovers", "sequences that left a verifier which was about to stop"),
        ("drafter_losses", "streams to drafters that broke"),
        ("drafter_refusals", "attempts to use a drafter that does not match"),
        ("drafter_timeouts", "rounds that drafters did not answer in time"),
        ("drafter_handovers", "sequences that left a drafter which was about to stop"),
        ("moves", "sequences that went to another verifier so that all have their share"),
        ("drafter_moves", "sequences that went to another drafter so that all have their share"),
        ("lookup_failures", "look-ups of host names that failed"),
        ("stale_drafts", "rows of draft replies for another epoch, length or slot than the sequence has now"),
        ("garbage_drafts", "rows of draft replies that no drafter should send"),
        ("nan_scores", "drafts whose score was no number; they count as drafts without a score"),
        ("bad_traceparents", "requests whose traceparent names no span"),
    )
}
"""The plain counts of counters.py by their fields."""
FALLBACKS = _counter("fallbacks", "sequences and steps that went without drafts though K was above 0", "cause")
DRAFTS = _counter("drafts", "verifications with at least one draft token")
DRAFT_TOKENS = _counter("draft_tokens", "draft tokens that came from a drafter, used or not", "drafter")
VERIFIED_TOKENS = _counter("verified_tokens", "draft tokens that the target verified")
ACCEPTED_TOKENS = _counter("accepted_tokens", "draft tokens that the target accepted")
VERIFIED_AT = _counter("verified_at_position", "draft tokens that the target verified at this position (from 0) of their draft", "position")
ACCEPTED_AT = _counter("accepted_at_position", "draft tokens that the target accepted at this position (from 0) of their draft", "position")
TIMEOUTS = _counter("draft_timeouts", "rounds that a drafter did not answer in time", "drafter")
REQUESTS = _counter("requests", "admitted requests")
REFUSED = _counter(
    "refused_requests",
    "requests that were not admitted, by gRPC status; a batch with too many counts once, calls without a valid key as key_refusals",
    "code",
)
FAILED = _counter("failed_requests", "admitted requests that ended as a whole with an error, by gRPC status", "code")
SEQUENCES = _counter("sequences", "ended sequences (choices of requests)", "reason")
GENERATED = _counter("generated_tokens", "tokens given to streams")
CACHED = _counter("cached_tokens", "prompt tokens of ended sequences that the verifier's prefix cache had")
STREAMS_OPENED = _counter("streams_opened", "calls of clients", "kind")
STREAMS_STALLED = _counter("stalled_streams", "calls whose requests were ended because their clients read nothing for client_stall_s", "kind")
KEY_REFUSALS = _counter("key_refusals", "calls and requests that were refused for the sake of their API key", "cause")
FAILED_RELOADS = _counter(
    "failed_reloads", "changed files that could not be used; peer_certificates: by each peer that was to be connected with them", "file"
)
SPANS = _counter("spans", "spans of traced requests")
LOST_SPANS = _counter("lost_spans", "those of them that were not exported: the queue was full, or the collector or the file failed")

READY = _gauge("ready", "1 while requests are taken")
PEER_UP = _gauge("peer_up", "1 while a verifier or drafter is connected", "service", "address")
RUNNING_REQUESTS = _gauge("running_requests", "admitted requests that have not ended")
WAITING = _gauge("waiting_sequences", "sequences in the queue")
PARKED = _gauge("parked_sequences", "sequences without a place until their clients read")
RUNNING = _gauge("running_sequences", "sequences that a verifier runs", "verifier")
KV_BLOCKS = _gauge("kv_blocks", "KV blocks of a verifier", "verifier")
KV_BLOCKS_USED = _gauge("kv_blocks_used", "KV blocks that can't be taken: in use, or promised to rounds in flight", "verifier")
K = _gauge("speculative_tokens", "K of the last step", "verifier")
OPEN = _gauge("drafter_open_sequences", "sequences open at a drafter", "drafter")
STREAMS = _gauge("streams", "calls of clients that are open", "kind")

QUEUE = _histogram("queue_seconds", "waiting for a verifier, each time that a sequence did")
FIRST_TOKEN = _histogram("time_to_first_token_seconds", "from a request's arrival to the first token of each choice")
INTER_TOKEN = _histogram("inter_token_latency_seconds", "between tokens of a sequence: a step's gap in equal parts, one for each token that it gave")
REQUEST = _histogram("request_seconds", "from a request's arrival to its end")
PROMPT_TOKENS = _histogram("prompt_tokens", "prompt length of admitted requests")
SEQUENCE_TOKENS = _histogram("sequence_tokens", "generated tokens of ended sequences")
STEP = _histogram("step_seconds", "whole steps", "verifier")
STEP_PART = _histogram("step_part_seconds", f"steps by what they went to: {', '.join(StepParts._fields)}", "verifier", "part")
STEP_K = _histogram("step_speculative_tokens", "K of steps", "verifier")
PREDICTED = _histogram("predicted_cost_seconds", "forward passes as the verifier's cost table has them", "verifier")
MEASURED = _histogram("measured_cost_seconds", "the same forward passes as they were", "verifier")
DRAFT_REPLY = _histogram("draft_reply_seconds", "round trips to a drafter", "drafter")
HOP = _histogram("hop_seconds", "round trips without what the peer itself took", "service", "address")

METRICS: tuple[Metric, ...] = (
    *COUNTS.values(),
    FALLBACKS, DRAFTS, DRAFT_TOKENS, VERIFIED_TOKENS, ACCEPTED_TOKENS, VERIFIED_AT, ACCEPTED_AT, TIMEOUTS, REQUESTS, REFUSED, FAILED, SEQUENCES,
    GENERATED, CACHED, STREAMS_OPENED, STREAMS_STALLED, KEY_REFUSALS, FAILED_RELOADS, SPANS, LOST_SPANS, READY, PEER_UP, RUNNING_REQUESTS, WAITING,
    PARKED, RUNNING, KV_BLOCKS, KV_BLOCKS_USED, K, OPEN, STREAMS, QUEUE, FIRST_TOKEN, INTER_TOKEN, REQUEST, PROMPT_TOKENS, SEQUENCE_TOKENS, STEP,
    STEP_PART, STEP_K, PREDICTED, MEASURED, DRAFT_REPLY, HOP, *ADAPTIVE_METRICS, *VARIANT_METRICS,
)  # fmt: skip


def collect(engine: Engine) -> Iterator[Sample]:
    """Everything as it is now; may run on any thread."""
    metrics = engine.metrics
    yield from _counters(engine.counters, 0 if engine.description is None else engine.description.num_speculative_tokens)
    yield from _requests(engine, metrics)
    yield from _lanes(engine, metrics)
    yield from _drafters(engine, metrics)
    yield from collect_adaptive(engine)
    yield from collect_variants(engine)


def known_drafters(engine: Engine) -> dict[Drafter, list[DraftLink]]:
    """The drafters and the lanes' links to them."""
    links: dict[Drafter, list[DraftLink]] = {}
    for lane in list(engine.lanes):
        for link in list(lane.links):
            links.setdefault(link.drafter, []).append(link)
    return links


def per_position(counters: Counters, num_positions: int = 0) -> tuple[list[int], list[int]]:
    """(verified, accepted) draft tokens by position, at least num_positions of them."""
    outcomes = [counts[:] for counts in counters.outcomes]
    size = max([num_positions, *(num_drafts for num_drafts, counts in enumerate(outcomes) if any(counts))])
    verified, accepted = [sum(counts) for counts in outcomes[: size + 1]], [0] * (size + 1)
    for counts in outcomes[: size + 1]:
        for num_accepted, count in enumerate(counts):
            accepted[num_accepted] += count
    return _from_position(verified), _from_position(accepted)


def _from_position(counts: list[int]) -> list[int]:
    """From drafts by their number of tokens, those that have a token at each position: whoever has n has one at each below n."""
    return list(accumulate(reversed(counts)))[::-1][1:]


def _counters(counters: Counters, num_positions: int) -> Iterator[Sample]:
    for name, metric in COUNTS.items():
        yield Sample(metric, (), getattr(counters, name))
    yield from _by_label(FALLBACKS, CAUSES, counters.fallbacks)
    verified, accepted = per_position(counters, num_positions)
    # Taken from one reading: a scrape never shows more accepted than verified.
    yield Sample(DRAFTS, (), verified[0] if verified else 0)
    yield Sample(VERIFIED_TOKENS, (), sum(verified))
    yield Sample(ACCEPTED_TOKENS, (), sum(accepted))
    for metric, counts in ((VERIFIED_AT, verified), (ACCEPTED_AT, accepted)):
        for position, count in enumerate(counts):
            yield Sample(metric, (str(position),), count)


def _requests(engine: Engine, metrics: Metrics) -> Iterator[Sample]:
    # What ends is read before what begins: the difference is never negative.
    num_ended, num_requests = metrics.request.count, metrics.num_requests
    closed, opened = dict(metrics.streams_closed), dict(metrics.streams_opened)
    yield Sample(READY, (), int(engine.ready.is_ready))
    yield Sample(REQUESTS, (), num_requests)
    yield Sample(RUNNING_REQUESTS, (), num_requests - num_ended)
    yield Sample(WAITING, (), engine.num_waiting)
    yield Sample(PARKED, (), engine.num_parked)
    yield from _by_label(REFUSED, REFUSALS, metrics.refusals_by_code)
    yield from _by_label(FAILED, FAILURES, metrics.failures_by_code)
    yield from _by_label(SEQUENCES, REASONS, metrics.sequences_by_reason)
    yield Sample(GENERATED, (), metrics.num_generated_tokens)
    yield Sample(CACHED, (), metrics.num_cached_tokens)
    yield from _by_label(KEY_REFUSALS, KEY_CAUSES, {} if metrics.keys is None else metrics.keys.num_refused)
    yield Sample(FAILED_RELOADS, ("api_keys",), 0 if metrics.keys is None else metrics.keys.num_failed_reloads)
    yield Sample(FAILED_RELOADS, ("certificates",), 0 if metrics.certificates is None else metrics.certificates.num_failed_reloads)
    yield Sample(FAILED_RELOADS, ("peer_certificates",), 0 if metrics.connectors is None else metrics.connectors.num_failed_reloads)
    yield Sample(SPANS, (), 0 if metrics.tracer is None else metrics.tracer.num_recorded)
    yield Sample(LOST_SPANS, (), 0 if metrics.tracer is None else metrics.tracer.num_dropped + metrics.tracer.num_failed)
    for kind in STREAM_KINDS:
        yield Sample(STREAMS_OPENED, (kind,), opened.get(kind, 0))
        yield Sample(STREAMS_STALLED, (kind,), metrics.streams_stalled[kind])
        yield Sample(STREAMS, (kind,), opened.get(kind, 0) - closed.get(kind, 0))
    for metric, histogram in (
        (QUEUE, metrics.queue),
        (FIRST_TOKEN, metrics.first_token_latency),
        (INTER_TOKEN, metrics.inter_token_latency),
        (REQUEST, metrics.request),
        (PROMPT_TOKENS, metrics.prompt_tokens),
        (SEQUENCE_TOKENS, metrics.generated_tokens),
    ):
        yield Sample(metric, (), histogram)


def _lanes(engine: Engine, metrics: Metrics) -> Iterator[Sample]:
    lanes = list(engine.lanes)
    for lane in lanes:
        used = lane.num_blocks - lane.num_free_blocks if lane.is_ready else 0
        yield Sample(PEER_UP, ("verifier", lane.address), int(lane.is_ready))
        yield Sample(RUNNING, (lane.address,), len(lane.running))
        yield Sample(KV_BLOCKS, (lane.address,), lane.num_blocks)
        yield Sample(KV_BLOCKS_USED, (lane.address,), used)
        yield Sample(K, (lane.address,), metrics.lanes.get(lane.address, _NO_STEPS).num_speculative_tokens)
    # Also those that are gone: what was counted stays.
    for address, values in {**{lane.address: _NO_STEPS for lane in lanes}, **dict(metrics.lanes)}.items():
        for metric, histogram in (
            (STEP, values.step),
            (STEP_K, values.k),
            (PREDICTED, values.predicted),
            (MEASURED, values.measured),
        ):
            yield Sample(metric, (address,), histogram)
        for part, histogram in values.parts.items():
            yield Sample(STEP_PART, (address, part), histogram)
        yield Sample(HOP, ("verifier", address), values.hop)


def _drafters(engine: Engine, metrics: Metrics) -> Iterator[Sample]:
    drafters = known_drafters(engine)
    for drafter, links in drafters.items():
        yield Sample(PEER_UP, ("drafter", drafter.address), int(any(link.is_connected for link in links)))
        yield Sample(OPEN, (drafter.address,), drafter.num_open)
    for address, values in {**{drafter.address: _NO_REPLIES for drafter in drafters}, **dict(metrics.drafters)}.items():
        yield Sample(DRAFT_TOKENS, (address,), values.num_draft_tokens)
        yield Sample(TIMEOUTS, (address,), values.num_timeouts)
        yield Sample(DRAFT_REPLY, (address,), values.reply)
        yield Sample(HOP, ("drafter", address), values.hop)


def _by_label(metric: Metric, known: tuple[str, ...], counts: dict[str, int]) -> Iterator[Sample]:
    """One series a label: those that are known from the start, and whatever else was counted."""
    for label, count in {**dict.fromkeys(known, 0), **dict(counts)}.items():
        yield Sample(metric, (label,), count)


_NO_STEPS = LaneMetrics()
_NO_REPLIES = DrafterMetrics()
