"""A span of each traced request, as whose child the coordinator's spans begin."""

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from specwire.config import HttpConfig
from specwire.errors import SpecwireError
from specwire.http.board import Board
from specwire.http.failures import Refusal
from specwire.http.lifetime import ClientGoneError
from specwire.http.metrics import LOST_SPANS, SPANS
from specwire.tracing import Span, SpanError, TraceContext, Tracer, error_of, is_sampled, open_tracer, parse_traceparent
from specwire.tracing.span import AttributeValue


class RequestSpan:
    """A traced request, from its arrival on.

    Args:
        spans: takes it when it has ended.
        own: the span itself.
        parent_id: the client's; 0 = none.
    """

    def __init__(self, spans: "HttpSpans", own: TraceContext, parent_id: int) -> None:
        self._spans = spans
        self._own = own
        self._parent_id = parent_id
        self._start_ns = time.time_ns()
        self._started_ns = time.monotonic_ns()

    def end(self, attributes: Mapping[str, AttributeValue], error: BaseException | None) -> None:
        """It has ended, well or not."""
        end_ns = self._start_ns + time.monotonic_ns() - self._started_ns
        own, parent_id = self._own, self._parent_id
        failure = None if error is None else _failure(error)
        span = Span("http", own.trace_id, own.span_id, parent_id, parent_id > 0, self._start_ns, end_ns, attributes, error=failure)
        self._spans.record(span)


class HttpSpans:
    """Decides which requests are traced, and lets the client hand that on to the coordinator.

    Args:
        tracer: None = spans go nowhere, and a client's own trace is only handed on.
        sample_ratio: share of the requests that are traced where their clients do not decide it.
        board: counts.
    """

    def __init__(self, tracer: Tracer | None, sample_ratio: float, board: Board) -> None:
        self._tracer = tracer
        self._sample_ratio = sample_ratio
        self._board = board

    @contextlib.contextmanager
    def follow(self, traceparent: str | None) -> Iterator[RequestSpan | None]:
        """What is called in the `with` belongs to the request's span, or, where it has none, to what its client says.

        Args:
            traceparent: the request's header.
        """
        parent = parse_traceparent(traceparent) if traceparent else None
        span, current = self._begin(parent)
        if current is None:
            yield None
            return
        flags = otel_trace.TraceFlags(otel_trace.TraceFlags.SAMPLED if current.is_sampled else otel_trace.TraceFlags.DEFAULT)
        carried = otel_trace.NonRecordingSpan(otel_trace.SpanContext(current.trace_id, current.span_id, is_remote=True, trace_flags=flags))
        token = otel_context.attach(otel_trace.set_span_in_context(carried))
        try:
            yield span
        finally:
            otel_context.detach(token)

    def record(self, span: Span) -> None:
        """A span that has ended."""
        if self._tracer is None:
            return
        self._tracer.record(1, lambda: [span])
        self._board.add(SPANS)
        self._count_lost(self._tracer)

    def close(self) -> None:
        """Exports what waits."""
        if self._tracer is not None:
            self._tracer.close()
            self._count_lost(self._tracer)

    def _begin(self, parent: TraceContext | None) -> tuple[RequestSpan | None, TraceContext | None]:
        """The request's span, and what the coordinator is told."""
        tracer = self._tracer
        if tracer is None:
            return None, parent
        trace_id = tracer.new_trace_id() if parent is None else parent.trace_id
        wanted = is_sampled(trace_id, self._sample_ratio) if parent is None else parent.is_sampled
        own = TraceContext(trace_id, tracer.new_span_id(), wanted)
        if not wanted:
            return None, own if parent is None else parent
        return RequestSpan(self, own, 0 if parent is None else parent.span_id), own

    def _count_lost(self, tracer: Tracer) -> None:
        self._board.add(LOST_SPANS, amount=tracer.num_dropped + tracer.num_failed - self._board.own(LOST_SPANS))


def open_spans(config: HttpConfig, board: Board) -> HttpSpans:
    """As configured. Raises InvalidArgumentError if a file or a variable of OpenTelemetry can't be used."""
    tracer = open_tracer("http", uuid.uuid4().hex, endpoint=config.trace_endpoint, file=config.trace_file)
    return HttpSpans(tracer, config.trace_sample_ratio, board)


def _failure(error: BaseException) -> SpanError:
    if isinstance(error, ClientGoneError):
        return SpanError("CANCELLED", "the client has hung up")
    if isinstance(error, Refusal):
        return error_of(error.__cause__) if isinstance(error.__cause__, SpecwireError) else SpanError("INVALID_ARGUMENT", str(error))
    return error_of(error)
