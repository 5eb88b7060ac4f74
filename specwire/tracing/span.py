"""A finished span as plain data."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specwire.statuses import status_code

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, AttributeValue]


class SpanError(NamedTuple):
    """Why a span did not end well: the name of a gRPC status code, and a message."""

    code: str
    message: str


class SpanEvent(NamedTuple):
    """Something at one moment of a span; Unix nanoseconds."""

    name: str
    time_ns: int
    attributes: Attributes


class Span(NamedTuple):
    """One finished span; times in Unix nanoseconds.

    Args:
        name: one of specwire.tracing.spec.
        parent_id: 0 for the root of a trace.
        is_parent_remote: the parent is another process's.
        links: (trace id, span id) of related spans in other traces.
        error: None if it ended well.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    is_parent_remote: bool
    start_ns: int
    end_ns: int
    attributes: Attributes
    links: Sequence[tuple[int, int]] = ()
    events: Sequence[SpanEvent] = ()
    error: SpanError | None = None


def error_of(error: BaseException) -> SpanError:
    """An exception as the status of a span: that of the gRPC call that it would end."""
    return SpanError(status_code(error).name, str(error))
