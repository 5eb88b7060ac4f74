"""The spans of a round in the service that runs it: one in the trace of each request that asked for it."""

import functools
from collections.abc import Callable
from typing import TypeVar

from specwire.messages import DraftRound, RoundTiming, VerifyRound
from specwire.tracing.context import parse_traceparent
from specwire.tracing.span import Attributes, Span, SpanError, error_of
from specwire.tracing.tracer import Tracer

Result = TypeVar("Result")


def record_round(
    tracer: Tracer | None,
    name: str,
    request: VerifyRound | DraftRound,
    timing: RoundTiming,
    outcome: Result | Exception,
    figures: Callable[[Result], dict[str, int]],
) -> None:
    """Records one span for each traceparent, from the round's start to its end; a traceparent that names no span is ignored and counted.

    Args:
        figures: attributes of a result.
    """
    if tracer is None or not request.traceparents:
        return
    attributes = {"specwire.lane": request.lane, "specwire.round": request.round, "specwire.num_rows": len(request.rows)}
    error = error_of(outcome) if isinstance(outcome, Exception) else None
    if not isinstance(outcome, Exception):
        attributes |= figures(outcome)
    tracer.record(len(request.traceparents), functools.partial(_make, tracer, name, request.traceparents, timing, attributes, error))


def _make(
    tracer: Tracer, name: str, traceparents: tuple[str, ...], timing: RoundTiming, attributes: Attributes, error: SpanError | None
) -> list[Span]:
    wait_ms = (timing.started_ns - timing.received_ns) / 1e6
    all_attributes = {**attributes, "specwire.wait_ms": wait_ms}
    spans = []
    for text in traceparents:
        parent = parse_traceparent(text)
        if parent is None:
            tracer.num_bad_traceparents += 1
        elif parent.is_sampled:
            spans.append(
                Span(
                    name, parent.trace_id, tracer.new_span_id(), parent.span_id, True, timing.started_ns, timing.finished_ns, all_attributes,
                    error=error,
                )
            )  # fmt: skip
    return spans
