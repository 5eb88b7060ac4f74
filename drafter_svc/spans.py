"""The span of a round: `draft`."""

from specwire.messages import DraftRound, DraftRowResult, RoundTiming, RowStatus
from specwire.tracing import Tracer, error_of, record_round


def trace_draft(tracer: Tracer | None, request: DraftRound, timing: RoundTiming, outcome: list[DraftRowResult] | Exception) -> None:
    """Records the round in the trace of each request that wants it; on the worker's thread."""
    if tracer is None or not request.traceparents:
        return
    attributes: dict[str, int] = {"specwire.lane": request.lane, "specwire.round": request.round, "specwire.num_rows": len(request.rows)}
    error = None
    if isinstance(outcome, Exception):
        error = error_of(outcome)
    else:
        attributes["specwire.num_draft_tokens"] = sum(len(row.draft_tokens) for row in outcome)
        attributes["specwire.num_rows_catching_up"] = sum(row.status is RowStatus.CATCHING_UP for row in outcome)
    record_round(tracer, "draft", request.traceparents, timing, attributes, error)
