"""The spans of a round: `draft`, and `features` where a head needs them."""

from specwire.messages import DraftRound, DraftRowResult, RoundTiming, RowStatus
from specwire.tracing import Tracer, record_round

from .feature_counts import Reading


def trace_draft(
    tracer: Tracer | None, request: DraftRound, timing: RoundTiming, outcome: list[DraftRowResult] | Exception, reading: Reading | None = None
) -> None:
    """On the worker's thread. reading: of features, for the whole batch that the round was part of."""
    record_round(tracer, "draft", request, timing, outcome, _figures)
    if reading is not None:
        times = RoundTiming(timing.received_ns, reading.started_ns, reading.finished_ns)
        record_round(tracer, "features", request, times, reading, lambda one: {"specwire.num_bytes": one.num_bytes})


def _figures(rows: list[DraftRowResult]) -> dict[str, int]:
    return {
        "specwire.num_draft_tokens": sum(len(row.draft_tokens) for row in rows),
        "specwire.num_rows_catching_up": sum(row.status is RowStatus.CATCHING_UP for row in rows),
    }
