"""Spans to send: plain ones, and one of each kind."""

from typing import Any

from specwire.errors import CancelledError
from specwire.tracing import Span, SpanError, SpanEvent, error_of


def span(number: int = 1, **changes: Any) -> Span:
    return Span("step", 1 << 100 | number, number, 3, False, 1_000, 2_000, {"specwire.choice": 0})._replace(**changes)


SPANS = [
    span(1),
    span(
        2,
        parent_id=0,
        name="generate",
        attributes={
            "specwire.request_id": "é",
            "x": True,
            "y": -1.5,
            "n": -7,
            "big": 1 << 62,
            "long": "é" * 300,
            "z": ["stop", "length"],
            "e": [],
            "i": [1, 2],
        },
    ),
    span(3, is_parent_remote=True, name="forward", error=SpanError("INTERNAL", "it broke"), links=[(5, 6), (7, 8)]),
    span(4, name="propose", events=[SpanEvent("fallback", 1_500, {"specwire.cause": "drafter_timeout"})], error=error_of(CancelledError("gone"))),
]
