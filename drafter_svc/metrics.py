"""The drafter's metrics: what they are called, what the worker counts, and their values now."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from specwire.engine.counts import PassCounts
from specwire.messages import DraftRowResult, RowStatus
from specwire.metrics import STEP_BOUNDS, Histogram, Metric, Sample, make_counter, make_gauge, make_histogram
from specwire.tls import ServerCertificates
from specwire.tracing import Tracer

from .feature_counts import OUTCOMES, PATHS, FeatureCounts
from .session import SequencePool

_counter, _gauge, _histogram = partial(make_counter, "drafter"), partial(make_gauge, "drafter"), partial(make_histogram, "drafter")
ROUNDS = _counter("rounds", "answered rounds: those with rows")
ROWS = _counter("rows", "answered rows by their status", "status")
DRAFT_TOKENS = _counter("draft_tokens", "draft tokens in answers")
CATCH_UP_TOKENS = _counter("catch_up_tokens", "committed tokens computed between rounds (prefill)")
GRAPH_PASSES = _counter("graph_passes", "forward passes of the draft model as CUDA graphs")
EAGER_PASSES = _counter("eager_passes", "forward passes of the draft model kernel by kernel: chunks of prompts, and all of them on a CPU")
PASS_TOKENS = _counter("pass_tokens", "tokens that went through the draft model: committed ones, and drafts that others followed")
PADDED_TOKENS = _counter("padded_tokens", "the same with the padding of CUDA graphs")
SPARED_ROWS = _counter("spared_rows", "rows that the model was not asked for, since a lookup of the list was expected to do better")
STREAMS_OPENED = _counter("streams_opened", "Draft streams of coordinators' lanes")
FAULTS = _counter("faults", "batches and chunks that failed for no reason of their own")
FAILED_RELOADS = _counter("failed_certificate_reloads", "changed TLS files that could not be used")
SPANS = _counter("spans", "spans of traced requests")
LOST_SPANS = _counter("lost_spans", "those of them that were not exported: the queue was full, or the collector or the file failed")
BAD_TRACEPARENTS = _counter("bad_traceparents", "traceparents of rounds that name no span")
FEATURE_SPANS = _counter("feature_spans", "ranges of positions whose features were asked for, by way and what became of them", "path", "outcome")
FEATURE_BYTES = _counter("feature_bytes", "bytes of features that were read, by way", "path")
UNSHARED = _counter("unshared_feature_sources", "verifiers whose memory could not be read here, so that their features come over gRPC")
READY = _gauge("ready", "1 once drafts can be asked for")
STREAMS = _gauge("streams", "open Draft streams")
OPEN = _gauge("open_sequences", "sequences open over all streams")
MAX_OPEN = _gauge("max_sequences", "most sequences that may be open")
DRAFTING = _histogram("drafting_seconds", "one batch of drafts: all rounds that waited")
FEATURES = _histogram("feature_seconds", "reading features of all sequences of a verifier that a batch or a chunk needs", "path")
QUEUE = _histogram("queue_seconds", "rounds waiting for those before them")

METRICS: tuple[Metric, ...] = (
    ROUNDS, ROWS, DRAFT_TOKENS, CATCH_UP_TOKENS, GRAPH_PASSES, EAGER_PASSES, PASS_TOKENS, PADDED_TOKENS, SPARED_ROWS,
    STREAMS_OPENED, FAULTS, FAILED_RELOADS, SPANS, LOST_SPANS, BAD_TRACEPARENTS,
    FEATURE_SPANS, FEATURE_BYTES, UNSHARED, READY, STREAMS, OPEN, MAX_OPEN,
    DRAFTING, QUEUE, FEATURES,
)  # fmt: skip


class DrafterMetrics:
    """Counts since the start of the process. The worker's thread fills it, except what is said to be the event loop's.

    Args:
        pool: of the open sequences.
        tracer: whose spans are counted, too.
    """

    def __init__(self, pool: SequencePool, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._certificates: ServerCertificates | None = None
        self._passes = PassCounts()
        self._features = FeatureCounts()
        self.num_draft_tokens = 0
        self.num_catch_up_tokens = 0
        self.num_faults = 0
        self.num_streams_opened = 0  # the event loop's
        self.num_streams = 0  # the event loop's
        self._is_ready = False  # the event loop's
        self.rows: Counter[RowStatus] = Counter()
        self.drafting = Histogram(STEP_BOUNDS)
        self.queue = Histogram(STEP_BOUNDS)
        self._pool = pool

    def watch(self, certificates: ServerCertificates | None) -> None:
        """What the server counts itself: changed files that can't be used."""
        self._certificates = certificates

    def watch_passes(self, counts: PassCounts) -> None:
        """What the method counts itself."""
        self._passes = counts

    def watch_features(self, counts: FeatureCounts) -> None:
        """What reading features took."""
        self._features = counts

    def ready(self) -> None:
        """Drafts can be asked for from now on."""
        self._is_ready = True

    def stream_opened(self, num_streams: int) -> None:
        """num_streams: open ones now."""
        self.num_streams_opened += 1
        self.num_streams = num_streams

    def batch_drafted(self, started_ns: int, finished_ns: int) -> None:
        """Unix nanoseconds, whose clock may be set meanwhile."""
        self.drafting.observe(max(0, finished_ns - started_ns))

    def round_answered(self, rows: Sequence[DraftRowResult], waited_ns: int) -> None:
        self.queue.observe(max(0, waited_ns))
        statuses = [row.status for row in rows]
        num_ok = statuses.count(RowStatus.OK)  # nearly always all: hashing an enum's members one by one takes several times as long
        self.rows[RowStatus.OK] += num_ok
        if num_ok < len(statuses):
            self.rows.update([status for status in statuses if status is not RowStatus.OK])
        self.num_draft_tokens += sum([len(row.draft_tokens) for row in rows])

    def collect(self) -> Iterator[Sample]:
        """Everything as it is now; may run on any thread."""
        rows = dict(self.rows)
        for status in RowStatus:
            yield Sample(ROWS, (status.name.lower(),), rows.get(status, 0))
        for metric, value in (
            (ROUNDS, self.queue.count),
            (DRAFT_TOKENS, self.num_draft_tokens),
            (CATCH_UP_TOKENS, self.num_catch_up_tokens),
            (GRAPH_PASSES, self._passes.num_graph_passes),
            (EAGER_PASSES, self._passes.num_eager_passes),
            (PASS_TOKENS, self._passes.num_tokens),
            (PADDED_TOKENS, self._passes.num_padded_tokens),
            (SPARED_ROWS, self._passes.num_spared_rows),
            (STREAMS_OPENED, self.num_streams_opened),
            (FAULTS, self.num_faults),
            (FAILED_RELOADS, 0 if self._certificates is None else self._certificates.num_failed_reloads),
            (SPANS, 0 if self._tracer is None else self._tracer.num_recorded),
            (LOST_SPANS, 0 if self._tracer is None else self._tracer.num_dropped + self._tracer.num_failed),
            (BAD_TRACEPARENTS, 0 if self._tracer is None else self._tracer.num_bad_traceparents),
            (READY, int(self._is_ready)),
            (STREAMS, self.num_streams),
            (OPEN, self._pool.max_num_seqs - self._pool.num_free),
            (MAX_OPEN, self._pool.max_num_seqs),
        ):
            yield Sample(metric, (), value)
        yield Sample(DRAFTING, (), self.drafting)
        yield Sample(QUEUE, (), self.queue)
        yield from self._collect_features()

    def _collect_features(self) -> Iterator[Sample]:
        counts = self._features
        for path in PATHS:
            for outcome in OUTCOMES:
                yield Sample(FEATURE_SPANS, (path, outcome), counts.num_spans[path, outcome])
            yield Sample(FEATURE_BYTES, (path,), counts.num_bytes[path])
            yield Sample(FEATURES, (path,), counts.seconds[path])
        yield Sample(UNSHARED, (), counts.num_unshared)
