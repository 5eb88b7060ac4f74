"""How sequences and requests end: everything they hold is given back, and the sink is told, in the same turn of the event loop."""

from typing import TYPE_CHECKING

from specwire.errors import SpecwireError
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, TokenLogprobs
from specwire.statuses import status_code

from .sequence import Request, Sequence

if TYPE_CHECKING:
    from .admission import Admission


def end_sequence(
    admission: "Admission",
    sequence: Sequence,
    reason: FinishReason,
    *,
    token_ids: list[int] | None = None,
    origins: bytes = b"",
    text: str | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    stop_cause: int | str | None = None,
    error: SpecwireError | None = None,
) -> None:
    """Ends one choice; its last tokens, if any, are committed already."""
    _leave(admission, sequence)
    admission.telemetry.sequence_ended(sequence, reason.label, error)
    sequence.sink.choice(
        ChoiceDelta(
            index=sequence.choice,
            token_ids=token_ids or [],
            token_origins=origins,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_cause=stop_cause,
            usage=sequence.usage(),
            spec_stats=sequence.spec_stats(),
            error=None if error is None else error_status(error),
            draft_report=None if sequence.draft_log is None else sequence.draft_log.report(),
        )
    )
    sequence.request.choice_ended()


def fail_request(admission: "Admission", request: Request, error: SpecwireError) -> None:
    """Ends all choices that are left with one error."""
    unfinished = request.unfinished
    for sequence in unfinished:
        _leave(admission, sequence)
        admission.telemetry.sequence_ended(sequence, "error", error)
    admission.telemetry.request_failed(error)
    request.sink.fail(error_status(error))
    for _ in unfinished:
        request.choice_ended()


def progress_of(request: Request) -> str:
    """How far a request has come, for the message of the error that ends it."""
    counts = ", ".join(f"{s.num_generated_tokens} of at most {s.max_len - s.num_prompt_tokens}" for s in request.sequences)
    return f"it has {counts} tokens"


def error_status(error: SpecwireError) -> ErrorStatus:
    """What a client is told of an error that ends a choice, a request or one of a batch."""
    return ErrorStatus(status_code(error).value[0], str(error), error.retry_after_ms)


def _leave(admission: "Admission", sequence: Sequence) -> None:
    assert not sequence.is_finished, f"choice {sequence.choice} ends twice"
    sequence.is_finished = True
    if sequence.slot is not None and not sequence.slot.is_closed:
        sequence.slot.lane.release(sequence)
    else:
        admission.discard(sequence)
