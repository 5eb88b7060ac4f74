"""Trace contexts as W3C traceparent (https://www.w3.org/TR/trace-context/), and which traces are sampled."""

import re
import sys
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_LENGTH = 512
_SAMPLED = 1
_LOW_BITS = 1 << 64


class TraceContext(NamedTuple):
    """A span of somebody else: what a span here may have as its parent."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(text: str) -> TraceContext | None:
    """The context that a traceparent names, None if it names none: it is not well-formed, or all zeros."""
    match = _TRACEPARENT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Later versions may append fields; version 00 has none, and ff is forbidden.
    if version == "ff" or (version == "00" and rest):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return context if context.trace_id and context.span_id else None


def format_traceparent(trace_id: int, span_id: int) -> str:
    """The traceparent of a sampled span."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


def current_traceparent() -> str:
    """The traceparent of the caller's current OpenTelemetry span, "" if there is none. A program that never imported OpenTelemetry has none,
    and does not import it here."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else ""


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Whether a trace is in the sample: the low 64 bits of its id decide, as in OpenTelemetry's TraceIdRatioBased."""
    return trace_id % _LOW_BITS < round(ratio * _LOW_BITS)
