"""Spans of all services: what there is (spec), their identity on the wire (context), and their way out of the process (tracer, export)."""

from specwire.tracing.context import TraceContext, current_traceparent, format_traceparent, is_sampled, parse_traceparent
from specwire.tracing.rounds import record_round
from specwire.tracing.span import Attributes, Span, SpanError, SpanEvent, error_of
from specwire.tracing.tracer import Tracer, open_tracer

__all__ = [
    "Attributes",
    "Span",
    "SpanError",
    "SpanEvent",
    "TraceContext",
    "Tracer",
    "current_traceparent",
    "error_of",
    "format_traceparent",
    "is_sampled",
    "open_tracer",
    "parse_traceparent",
    "record_round",
]
