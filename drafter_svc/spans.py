"""The span of a round: `draft`."""

from specwire.messages import DraftRound, DraftRowResult, RoundTiming, RowStatus
from specwire.tracing import Tracer, record_round


def trace_draft(tracer: Tracer | None, request: DraftRound, timing: RoundTiming, outcome: list[DraftRowResult] | Exception) -> None:
    """On the worker's thread."""
    record_round(tracer, "draft", request, timing, outcome, _figures)


def _figures(rows: list[DraftRowResult]) -> dict[str, int]:
    return {
        "specwire.num_draft_tokens": sum(len(row.draft_tokens) for row in rows),
        "specwire.num_rows_catching_up": sum(row.status is RowStatus.CATCHING_UP for row in rows),
    }
