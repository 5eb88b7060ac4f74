"""Requests and replies between clients and the coordinator."""

from collections.abc import Iterable
from itertools import chain

from specwire.errors import SpecwireError
from specwire.messages import (
    ChoiceDelta,
    DraftReport,
    ErrorStatus,
    FinishReason,
    GenerateRequest,
    SessionEvent,
    SessionStart,
    SessionUpdate,
    SpecStats,
    StreamDelta,
    TokenizerSpec,
    TokenLogprobs,
    Usage,
)
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import common, describe
from specwire.wire.arrays import (
    check_columns,
    make_rows,
    pack_float32,
    pack_int32,
    pack_int64,
    split,
    unpack_float32,
    unpack_int32,
    unpack_int64,
)


def pack_request(request: GenerateRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=pack_int32(request.prompt_token_ids),
        sampling=common.pack_sampling(request.sampling),
        request_id=request.request_id,
        tenant_cache_key=request.tenant_cache_key,
        variant=request.variant,
        synthetic_acceptance_rates=pack_float32(request.synthetic_acceptance_rates),
        timeout_ms=request.timeout_ms,
        traceparent=request.traceparent,
        report_drafts=request.report_drafts,
    )


def unpack_request(message: pb.GenerateRequest) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=unpack_int32(message.prompt_token_ids, "prompt_token_ids"),
        sampling=common.unpack_sampling(message.sampling),
        request_id=message.request_id,
        tenant_cache_key=message.tenant_cache_key,
        variant=message.variant,
        synthetic_acceptance_rates=tuple(unpack_float32(message.synthetic_acceptance_rates, "synthetic_acceptance_rates")),
        timeout_ms=message.timeout_ms if message.HasField("timeout_ms") else None,
        traceparent=message.traceparent,
        report_drafts=message.report_drafts,
    )


def pack_choice(delta: ChoiceDelta) -> pb.ChoiceDelta:
    message = pb.ChoiceDelta(
        index=delta.index,
        token_ids=pack_int32(delta.token_ids),
        token_origins=delta.token_origins,
        text=delta.text,
        logprobs=None if delta.logprobs is None else _pack_logprobs(delta.logprobs),
        finish_reason=None if delta.finish_reason is None else f"FINISH_REASON_{delta.finish_reason.name}",
    )
    if isinstance(delta.stop_cause, str):
        message.stop_cause.stop_string = delta.stop_cause
    elif delta.stop_cause is not None:
        message.stop_cause.token_id = delta.stop_cause
    if delta.usage is not None:
        usage = delta.usage
        message.usage.num_prompt_tokens = usage.num_prompt_tokens
        message.usage.num_cached_tokens = usage.num_cached_tokens
        message.usage.num_generated_tokens = usage.num_generated_tokens
    if delta.spec_stats is not None:
        message.spec_stats.CopyFrom(_pack_stats(delta.spec_stats))
    if delta.error is not None:
        message.error.CopyFrom(_pack_error(delta.error))
    if delta.draft_report is not None:
        message.draft_report.CopyFrom(_pack_report(delta.draft_report))
    return message


def unpack_choice(message: pb.ChoiceDelta) -> ChoiceDelta:
    cause = message.stop_cause.WhichOneof("cause") if message.HasField("stop_cause") else None
    usage = message.usage
    return ChoiceDelta(
        index=message.index,
        token_ids=unpack_int32(message.token_ids, "token_ids"),
        token_origins=message.token_origins,
        text=message.text if message.HasField("text") else None,
        logprobs=_unpack_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_cause=getattr(message.stop_cause, cause) if cause else None,
        usage=Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_generated_tokens) if message.HasField("usage") else None,
        spec_stats=_unpack_stats(message.spec_stats) if message.HasField("spec_stats") else None,
        error=_unpack_error(message.error) if message.HasField("error") else None,
        draft_report=_unpack_report(message.draft_report) if message.HasField("draft_report") else None,
    )


def pack_response(choices: list[ChoiceDelta]) -> pb.GenerateResponse:
    return pb.GenerateResponse(choices=map(pack_choice, choices))


def pack_start(start: SessionStart) -> pb.SessionStart:
    return pb.SessionStart(stream_id=start.stream_id, request=pack_request(start.request))


def pack_command(starts: Iterable[pb.SessionStart], cancels: Iterable[int]) -> pb.SessionRequest:
    """Takes packed starts: whoever sends several must know how long each is."""
    return pb.SessionRequest(starts=starts, cancels=cancels)


def unpack_command(message: pb.SessionRequest) -> tuple[list[tuple[int, GenerateRequest | SpecwireError]], list[int]]:
    """(stream id, request) of each start, and the cancels. A request that can't be read is its error: the other starts are good."""
    return [(start.stream_id, _request_or_error(start.request)) for start in message.starts], list(message.cancels)


def pack_update(update: SessionUpdate) -> pb.SessionResponse:
    response = pb.SessionResponse()
    if update.deltas:
        stream_ids, indices, token_ids, origins = zip(*update.deltas, strict=True)
        deltas = response.deltas
        deltas.stream_ids, deltas.indices = pack_int64(stream_ids), pack_int32(indices)
        deltas.num_tokens = pack_int32(map(len, token_ids))
        deltas.token_ids = pack_int32(chain.from_iterable(token_ids))
        deltas.token_origins = b"".join(origins)
    for event in update.events:
        response.events.append(
            pb.SessionEvent(
                stream_id=event.stream_id,
                choice=None if event.choice is None else pack_choice(event.choice),
                error=None if event.error is None else _pack_error(event.error),
                done=event.done,
            )
        )
    return response


def unpack_update(message: pb.SessionResponse) -> SessionUpdate:
    deltas = message.deltas
    num_tokens = unpack_int32(deltas.num_tokens, "deltas.num_tokens")
    stream_ids, indices = unpack_int64(deltas.stream_ids, "deltas.stream_ids"), unpack_int32(deltas.indices, "deltas.indices")
    check_columns(("deltas.stream_ids", "deltas.indices", "deltas.num_tokens"), [stream_ids, indices, num_tokens])
    runs = split(unpack_int32(deltas.token_ids, "deltas.token_ids"), num_tokens, "deltas.token_ids")
    origins = split(deltas.token_origins, num_tokens, "deltas.token_origins")
    return SessionUpdate(
        deltas=make_rows(StreamDelta, zip(stream_ids, indices, runs, origins, strict=True)),
        events=[
            SessionEvent(
                event.stream_id,
                unpack_choice(event.choice) if event.HasField("choice") else None,
                _unpack_error(event.error) if event.HasField("error") else None,
                event.done,
            )
            for event in message.events
        ],
    )


def unpack_batch_request(message: pb.GenerateBatchRequest) -> list[GenerateRequest | SpecwireError]:
    """The requests in order; in place of one that can't be read its error."""
    return [_request_or_error(request) for request in message.requests]


def pack_batch_response(index: int, choices: list[ChoiceDelta], error: ErrorStatus | None) -> pb.GenerateBatchResponse:
    return pb.GenerateBatchResponse(index=index, choices=map(pack_choice, choices), error=None if error is None else _pack_error(error))


def pack_tokenizer(spec: TokenizerSpec) -> pb.GetTokenizerResponse:
    return pb.GetTokenizerResponse(tokenizer=describe.pack_tokenizer(spec))


def unpack_tokenizer(response: pb.GetTokenizerResponse) -> TokenizerSpec:
    return describe.unpack_tokenizer(response.tokenizer)


def _request_or_error(message: pb.GenerateRequest) -> GenerateRequest | SpecwireError:
    try:
        return unpack_request(message)
    except SpecwireError as error:
        return error


def _pack_error(error: ErrorStatus) -> pb.ErrorStatus:
    return pb.ErrorStatus(code=error.code, message=error.message, retry_after_ms=error.retry_after_ms)


def _unpack_error(message: pb.ErrorStatus) -> ErrorStatus:
    return ErrorStatus(message.code, message.message, message.retry_after_ms if message.HasField("retry_after_ms") else None)


def _pack_stats(stats: SpecStats) -> pb.SpecStats:
    return pb.SpecStats(
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        accepted_per_position=pack_int32(stats.accepted_per_position),
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        synthetic=stats.synthetic,
    )


def _unpack_stats(message: pb.SpecStats) -> SpecStats:
    return SpecStats(
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        accepted_per_position=tuple(unpack_int32(message.accepted_per_position, "accepted_per_position")),
        num_steps=message.num_steps,
        num_preemptions=message.num_preemptions,
        synthetic=message.synthetic,
    )


def _pack_report(report: DraftReport) -> pb.DraftReport:
    return pb.DraftReport(
        num_draft_tokens=pack_int32(report.num_draft_tokens),
        num_accepted_tokens=pack_int32(report.num_accepted_tokens),
        confidences=pack_float32(report.confidences),
    )


def _unpack_report(message: pb.DraftReport) -> DraftReport:
    report = DraftReport(
        unpack_int32(message.num_draft_tokens, "draft_report.num_draft_tokens"),
        unpack_int32(message.num_accepted_tokens, "draft_report.num_accepted_tokens"),
        unpack_float32(message.confidences, "draft_report.confidences"),
    )
    check_columns(("num_draft_tokens", "num_accepted_tokens"), (report.num_draft_tokens, report.num_accepted_tokens))
    split(report.confidences, report.num_draft_tokens, "draft_report.confidences")
    return report


def _pack_logprobs(logprobs: list[TokenLogprobs]) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        sampled=pack_float32(entry.sampled for entry in logprobs),
        num_top=len(logprobs[0].top) if logprobs else 0,
        top_token_ids=pack_int32(token for entry in logprobs for token, _ in entry.top),
        top_logprobs=pack_float32(value for entry in logprobs for _, value in entry.top),
    )


def _unpack_logprobs(message: pb.TokenLogprobs) -> list[TokenLogprobs]:
    sampled = unpack_float32(message.sampled, "logprobs.sampled")
    counts = [message.num_top] * len(sampled)
    ids = split(unpack_int32(message.top_token_ids, "logprobs.top_token_ids"), counts, "logprobs.top_token_ids")
    values = split(unpack_float32(message.top_logprobs, "logprobs.top_logprobs"), counts, "logprobs.top_logprobs")
    return [TokenLogprobs(value, list(zip(ids[i], values[i], strict=True))) for i, value in enumerate(sampled)]
