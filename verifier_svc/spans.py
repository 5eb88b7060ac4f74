"""The span of a round: `forward`."""

from specwire.messages import RoundTiming, VerifyResult, VerifyRound
from specwire.tracing import Tracer, error_of, record_round


def trace_forward(tracer: Tracer | None, request: VerifyRound, timing: RoundTiming, outcome: VerifyResult | Exception) -> None:
    """Records the round in the trace of each request that wants it; on the worker thread."""
    if tracer is None or not request.traceparents:
        return
    attributes: dict[str, int] = {"specwire.lane": request.lane, "specwire.round": request.round, "specwire.num_rows": len(request.rows)}
    error = None
    if isinstance(outcome, Exception):
        error = error_of(outcome)
    else:
        attributes["specwire.num_tokens"] = outcome.num_padded_tokens
        attributes["specwire.num_free_blocks"] = outcome.free_blocks
    record_round(tracer, "forward", request.traceparents, timing, attributes, error)
