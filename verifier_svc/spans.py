"""The span of a round: `forward`."""

from specwire.messages import RoundTiming, VerifyResult, VerifyRound
from specwire.tracing import Tracer, record_round


def trace_forward(tracer: Tracer | None, request: VerifyRound, timing: RoundTiming, outcome: VerifyResult | Exception) -> None:
    """On the worker thread."""
    record_round(tracer, "forward", request, timing, outcome, _figures)


def _figures(result: VerifyResult) -> dict[str, int]:
    return {"specwire.num_tokens": result.num_padded_tokens, "specwire.num_free_blocks": result.free_blocks}
