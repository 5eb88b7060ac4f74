"""The verifier's metrics: what they are called, what is measured around rounds, and their values now."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from specwire.messages import RoundTiming, RowStatus
from specwire.metrics import STEP_BOUNDS, Histogram, Metric, Sample, make_counter, make_gauge, make_histogram
from specwire.tls import ServerCertificates
from specwire.tracing import Tracer

if TYPE_CHECKING:  # brings torch
    from .verifier import Verifier

_counter, _gauge, _histogram = partial(make_counter, "verifier"), partial(make_gauge, "verifier"), partial(make_histogram, "verifier")
ROUNDS = _counter("rounds", "rounds that were run, those without rows included")
ROWS = _counter("rows", "answered rows by their status", "status")
TOKENS = _counter("tokens", "tokens that went through the model")
PADDED_TOKENS = _counter("padded_tokens", "tokens of the batches that went through the model, padding included")
DRAFT_TOKENS = _counter("draft_tokens", "draft tokens that were verified")
ACCEPTED_TOKENS = _counter("accepted_tokens", "draft tokens that were accepted")
PREFIX_TOKENS = _counter("prefix_cache_looked_up_tokens", "tokens of opened sequences that were looked for in the prefix cache")
PREFIX_HITS = _counter("prefix_cache_hit_tokens", "tokens of opened sequences that the prefix cache had")
SESSIONS = _counter("sessions", "Verify streams of coordinators that were let in")
TAKEOVERS = _counter("takeovers", "sessions that ended because the same coordinator opened another one")
REFUSED = _counter("refused_sessions", "Verify streams that were not let in")
GRAPH_ROUNDS = _counter("graph_rounds", "rounds that ran as one captured graph")
EAGER_ROUNDS = _counter("eager_rounds", "rounds that ran kernel by kernel: with a chunk longer than a graph takes, or where there are no graphs")
OUTSIDE_ROWS = _counter("rows_sampled_outside", "rows that were sampled behind the graph, which waits for the device")
WAITS = _counter("waits", "rows that could be planned only once the rounds ahead of them were read")
FAULTS = _counter("faults", "rounds that failed for no reason of their own")
FAILED_RELOADS = _counter("failed_certificate_reloads", "changed TLS files that could not be used")
SPANS = _counter("spans", "spans of traced requests")
LOST_SPANS = _counter("lost_spans", "those of them that were not exported: the queue was full, or the collector or the file failed")
BAD_TRACEPARENTS = _counter("bad_traceparents", "traceparents of rounds that name no span")
FEATURE_RANGES = _counter("feature_ranges", "ranges of positions whose features drafters asked for over gRPC, by what became of them", "status")
FEATURE_BYTES = _counter("feature_bytes", "bytes of features that went to drafters over gRPC")
READY = _gauge("ready", "1 once the model is loaded")
HELD = _gauge("held", "1 while a coordinator holds this verifier")
OPEN = _gauge("open_sequences", "open slots")
BLOCKS = _gauge("kv_blocks", "KV blocks")
BLOCKS_USED = _gauge("kv_blocks_used", "KV blocks that can't be taken now")
IN_FLIGHT = _gauge("rounds_in_flight", "rounds that were launched and are not read")
FORWARD = _histogram("forward_seconds", "running a round, once the round before it is done: planning its rows, forward pass, sampling, acceptance")
FEATURES = _histogram("feature_seconds", "reading the features of one answer over gRPC")
QUEUE = _histogram("queue_seconds", "rounds waiting for those before them")

METRICS: tuple[Metric, ...] = (
    ROUNDS, ROWS, TOKENS, PADDED_TOKENS, DRAFT_TOKENS, ACCEPTED_TOKENS, PREFIX_TOKENS, PREFIX_HITS, GRAPH_ROUNDS, EAGER_ROUNDS,
    OUTSIDE_ROWS, WAITS, SESSIONS, TAKEOVERS, REFUSED, FAULTS, FAILED_RELOADS, SPANS, LOST_SPANS, BAD_TRACEPARENTS, FEATURE_RANGES, FEATURE_BYTES,
    READY, HELD, OPEN, BLOCKS, BLOCKS_USED, IN_FLIGHT, FORWARD, QUEUE, FEATURES,
)  # fmt: skip


class VerifierMetrics:
    """What happens around the rounds; what happens in them the verifier counts itself. Starts at 0, before a model is there.

    Args:
        tracer: whose spans are counted, too.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._certificates: ServerCertificates | None = None
        self.num_sessions = 0
        self.num_takeovers = 0
        self.num_refused = 0
        self.num_faults = 0
        self.is_held = False
        self.forward = Histogram(STEP_BOUNDS)
        self.queue = Histogram(STEP_BOUNDS)
        self.features = Histogram(STEP_BOUNDS)
        self._verifier: Verifier | None = None

    def watch(self, certificates: ServerCertificates | None) -> None:
        """What the server counts itself: changed files that can't be used."""
        self._certificates = certificates

    def loaded(self, verifier: "Verifier") -> None:
        """What counts in its rounds is there."""
        self._verifier = verifier

    def round_run(self, timing: RoundTiming) -> None:
        """On the worker's thread. The clock may have been set meanwhile."""
        self.queue.observe(max(0, timing.started_ns - timing.received_ns))
        self.forward.observe(max(0, timing.finished_ns - timing.started_ns))

    def collect(self) -> Iterator[Sample]:
        """Everything as it is now; may run on any thread."""
        verifier = self._verifier
        rows = {} if verifier is None else dict(verifier.num_rows)
        for status in RowStatus:
            yield Sample(ROWS, (status.name.lower(),), rows.get(status, 0))
        books = None if verifier is None else verifier.features
        ranges = {} if books is None else dict(books.num_pulled)
        for status in (RowStatus.OK, RowStatus.STALE, RowStatus.BAD):
            yield Sample(FEATURE_RANGES, (status.name.lower(),), ranges.get(status, 0))
        num_blocks = 0 if verifier is None else verifier.num_blocks
        for metric, value in (
            (ROUNDS, self.forward.count),
            (TOKENS, 0 if verifier is None else verifier.round_counts.num_tokens),
            (PADDED_TOKENS, 0 if verifier is None else verifier.round_counts.num_padded_tokens),
            (DRAFT_TOKENS, 0 if verifier is None else verifier.counts.num_draft_tokens),
            (ACCEPTED_TOKENS, 0 if verifier is None else verifier.counts.num_accepted_tokens),
            (PREFIX_TOKENS, 0 if verifier is None else verifier.counts.num_looked_up_tokens),
            (PREFIX_HITS, 0 if verifier is None else verifier.counts.num_cached_tokens),
            (GRAPH_ROUNDS, 0 if verifier is None else verifier.round_counts.num_graph_rounds),
            (EAGER_ROUNDS, 0 if verifier is None else verifier.round_counts.num_eager_rounds),
            (OUTSIDE_ROWS, 0 if verifier is None else verifier.round_counts.num_rows_sampled_outside),
            (WAITS, 0 if verifier is None else verifier.num_waits),
            (SESSIONS, self.num_sessions),
            (TAKEOVERS, self.num_takeovers),
            (REFUSED, self.num_refused),
            (FAULTS, self.num_faults),
            (FAILED_RELOADS, 0 if self._certificates is None else self._certificates.num_failed_reloads),
            (SPANS, 0 if self._tracer is None else self._tracer.num_recorded),
            (LOST_SPANS, 0 if self._tracer is None else self._tracer.num_dropped + self._tracer.num_failed),
            (BAD_TRACEPARENTS, 0 if self._tracer is None else self._tracer.num_bad_traceparents),
            (FEATURE_BYTES, 0 if books is None else books.num_pulled_bytes),
            (READY, int(verifier is not None)),
            (HELD, int(self.is_held)),
            (OPEN, 0 if verifier is None else verifier.num_open_slots),
            (BLOCKS, num_blocks),
            (BLOCKS_USED, 0 if verifier is None else num_blocks - verifier.num_free_blocks),
            (IN_FLIGHT, 0 if verifier is None else verifier.num_unread_rounds),
        ):
            yield Sample(metric, (), value)
        yield Sample(FORWARD, (), self.forward)
        yield Sample(QUEUE, (), self.queue)
        yield Sample(FEATURES, (), self.features)
