"""Rounds between coordinator and verifier."""

from functools import partial
from itertools import chain, repeat

from specwire.errors import InvalidArgumentError
from specwire.messages import (
    LogitOverlay,
    ServiceDescription,
    TokenizerSpec,
    TokenLogprobs,
    VerifyOpen,
    VerifyResult,
    VerifyRound,
    VerifyRow,
    VerifyRowResult,
)
from specwire.v1 import verifier_pb2 as pb
from specwire.v1.types_pb2 import LogitOverlay as LogitOverlayMessage
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

_ROW_COLUMNS = ("slots", "epochs", "parent_rounds", "token_budgets", "base_lens", "first_tokens", "from_rounds")
_INT64_COLUMNS = frozenset({"parent_rounds", "from_rounds"})
_RESULT_COLUMNS = ("statuses", "num_computed_tokens", "num_cached_tokens", "num_accepted")


def pack_description(description: ServiceDescription) -> pb.VerifierServiceDescribeResponse:
    return pb.VerifierServiceDescribeResponse(description=describe.pack_description(description))


def unpack_description(response: pb.VerifierServiceDescribeResponse) -> ServiceDescription:
    return describe.unpack_description(response.description)


def pack_tokenizer(spec: TokenizerSpec) -> pb.VerifierServiceGetTokenizerResponse:
    return pb.VerifierServiceGetTokenizerResponse(tokenizer=describe.pack_tokenizer(spec))


def unpack_tokenizer(response: pb.VerifierServiceGetTokenizerResponse) -> TokenizerSpec:
    return describe.unpack_tokenizer(response.tokenizer)


def pack_round(message: VerifyRound) -> pb.VerifyRequest:
    request = pb.VerifyRequest(
        session=message.session, lane=message.lane, round=message.round, traceparents=message.traceparents, sent_ns=message.sent_ns,
        closes=map(common.pack_close, message.closes), opens=map(partial(_pack_open, common.SamplingPacker()), message.opens),
    )  # fmt: skip
    if message.hello is not None:
        request.hello.CopyFrom(common.pack_hello(message.hello))
    if message.rows:
        *columns, drafts = zip(*message.rows, strict=True)
        rows = request.rows
        for name, column in zip(_ROW_COLUMNS, columns, strict=True):
            setattr(rows, name, pack_int64(column) if name in _INT64_COLUMNS else pack_int32(column))
        rows.num_drafts = pack_int32(map(len, drafts))
        rows.draft_tokens = pack_int32(chain.from_iterable(drafts))
        if message.proposals is not None:
            rows.proposals.CopyFrom(common.pack_proposals(message.proposals))
        if message.conditional is not None:
            rows.conditional.CopyFrom(common.pack_conditional(message.conditional))
        rows.overlays.extend(_pack_overlay(overlay) for overlay in message.overlays)
    return request


def unpack_round(request: pb.VerifyRequest) -> VerifyRound:
    rows = request.rows
    columns = [
        unpack_int64(getattr(rows, name), f"rows.{name}") if name in _INT64_COLUMNS else unpack_int32(getattr(rows, name), f"rows.{name}")
        for name in _ROW_COLUMNS
    ]
    num_drafts = unpack_int32(rows.num_drafts, "rows.num_drafts")
    check_columns((*_ROW_COLUMNS, "num_drafts"), [*columns, num_drafts])
    draft_tokens = unpack_int32(rows.draft_tokens, "rows.draft_tokens")
    drafts = split(draft_tokens, num_drafts, "rows.draft_tokens") if draft_tokens or any(num_drafts) else [draft_tokens] * len(num_drafts)
    return VerifyRound(
        session=request.session,
        lane=request.lane,
        round=request.round,
        closes=[common.unpack_close(close) for close in request.closes],
        opens=list(map(partial(_unpack_open, common.SamplingReader()), request.opens)),
        rows=make_rows(VerifyRow, zip(*columns, drafts, strict=True)),
        overlays=[_unpack_overlay(overlay, len(drafts)) for overlay in rows.overlays],
        proposals=common.unpack_proposals(rows.proposals, sum(num_drafts)) if rows.HasField("proposals") else None,
        conditional=common.unpack_conditional(rows.conditional, len(drafts)) if rows.HasField("conditional") else None,
        hello=common.unpack_hello(request.hello) if request.HasField("hello") else None,
        traceparents=tuple(request.traceparents),
        sent_ns=request.sent_ns,
    )


def pack_result(result: VerifyResult) -> pb.VerifyResponse:
    rows = result.rows
    statuses, num_computed, num_cached, num_accepted, token_ids, logprobs, errors = zip(*rows, strict=True) if rows else ((),) * 7
    response = pb.VerifyResponse(
        session=result.session, lane=result.lane, round=result.round, draining=result.draining, timing=common.pack_timing(result.timing),
        free_blocks=result.free_blocks, promised_blocks=result.promised_blocks, num_padded_tokens=result.num_padded_tokens,
        features=map(common.pack_feature, result.features), chosen_outcomes=pack_int32(result.chosen_outcomes),
        opened_num_cached_tokens=pack_int32(result.opened_num_cached_tokens),
        statuses=bytes(statuses), num_computed_tokens=pack_int32(num_computed), num_cached_tokens=pack_int32(num_cached),
        num_accepted=pack_int32(num_accepted), num_sampled=pack_int32(map(len, token_ids)), token_ids=pack_int32(chain.from_iterable(token_ids)),
        errors=[pb.RowError(row=index, message=error) for index, error in enumerate(errors) if error] if any(errors) else (),
    )  # fmt: skip
    if result.welcome is not None:
        response.welcome.CopyFrom(common.pack_welcome(result.welcome))
    if logprobs.count(None) < len(rows):
        asked = [(index, entries) for index, entries in enumerate(logprobs) if entries is not None]
        entries = [entry for _, of_row in asked for entry in of_row]
        response.logprobs.CopyFrom(
            pb.Logprobs(
                rows=pack_int32(index for index, _ in asked),
                sampled=pack_float32(entry.sampled for entry in entries),
                num_top=pack_int32(len(of_row[0].top) if of_row else 0 for _, of_row in asked),
                top_token_ids=pack_int32(token for entry in entries for token, _ in entry.top),
                top_logprobs=pack_float32(value for entry in entries for _, value in entry.top),
            )
        )
    return response


def unpack_result(response: pb.VerifyResponse) -> VerifyResult:
    num_sampled = unpack_int32(response.num_sampled, "num_sampled")
    names = (*_RESULT_COLUMNS, "num_sampled")
    columns: list[list] = [
        common.unpack_statuses(response.statuses),
        *(unpack_int32(getattr(response, name), name) for name in _RESULT_COLUMNS[1:]),
        num_sampled,
    ]
    check_columns(names, columns)
    token_ids = unpack_int32(response.token_ids, "token_ids")
    tokens = split(token_ids, num_sampled, "token_ids")
    logprobs = _unpack_logprobs(response.logprobs, num_sampled) if response.HasField("logprobs") else {}
    errors = {error.row: error.message for error in response.errors}
    row_logprobs = map(logprobs.get, range(len(tokens))) if logprobs else repeat(None)
    row_errors = (errors.get(row, "") for row in range(len(tokens))) if errors else repeat("")
    return VerifyResult(
        session=response.session,
        lane=response.lane,
        round=response.round,
        rows=make_rows(VerifyRowResult, zip(*columns[:4], tokens, row_logprobs, row_errors, strict=False)),
        free_blocks=response.free_blocks,
        promised_blocks=response.promised_blocks,
        num_padded_tokens=response.num_padded_tokens,
        features=[common.unpack_feature(feature) for feature in response.features],
        chosen_outcomes=unpack_int32(response.chosen_outcomes, "chosen_outcomes"),
        timing=common.unpack_timing(response.timing),
        welcome=common.unpack_welcome(response.welcome) if response.HasField("welcome") else None,
        draining=response.draining,
        opened_num_cached_tokens=unpack_int32(response.opened_num_cached_tokens, "opened_num_cached_tokens"),
        token_id_range=(min(token_ids, default=0), max(token_ids, default=0)),
    )


def _pack_open(packer: common.SamplingPacker, message: VerifyOpen) -> pb.VerifyOpen:
    return pb.VerifyOpen(
        slot=message.slot,
        epoch=message.epoch,
        token_ids=pack_int32(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=packer.pack(message.sampling),
        noise_key=message.noise_key,
        choice=message.choice,
        eos_token_ids=pack_int32(message.eos_token_ids),
        tenant_cache_key=message.tenant_cache_key,
        synthetic_acceptance_rates=pack_float32(message.synthetic_acceptance_rates),
        variant=message.variant,
        request_id=message.request_id,
    )


def _unpack_open(reader: common.SamplingReader, message: pb.VerifyOpen) -> VerifyOpen:
    return VerifyOpen(
        slot=message.slot,
        epoch=message.epoch,
        token_ids=unpack_int32(message.token_ids, "open.token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=reader.unpack(message.sampling),
        noise_key=message.noise_key,
        choice=message.choice,
        eos_token_ids=tuple(unpack_int32(message.eos_token_ids, "open.eos_token_ids")),
        tenant_cache_key=message.tenant_cache_key,
        synthetic_acceptance_rates=tuple(unpack_float32(message.synthetic_acceptance_rates, "open.synthetic_acceptance_rates")),
        variant=message.variant,
        request_id=message.request_id,
    )


def _pack_overlay(overlay: LogitOverlay) -> LogitOverlayMessage:
    return LogitOverlayMessage(
        row=overlay.row, position=overlay.position, masked_token_ids=pack_int32(overlay.masked_token_ids), grammar_bitmask=overlay.grammar_bitmask
    )


def _unpack_overlay(message: LogitOverlayMessage, num_rows: int) -> LogitOverlay:
    if message.row >= num_rows:
        raise InvalidArgumentError(f"an overlay names row {message.row}, but the round has {num_rows} rows; number rows from 0")
    return LogitOverlay(message.row, message.position, unpack_int32(message.masked_token_ids, "overlays.masked_token_ids"), message.grammar_bitmask)


def _unpack_logprobs(message: pb.Logprobs, num_sampled: list[int]) -> dict[int, list[TokenLogprobs]]:
    rows = unpack_int32(message.rows, "logprobs.rows")
    num_top = unpack_int32(message.num_top, "logprobs.num_top")
    if len(rows) != len(num_top) or any(not 0 <= row < len(num_sampled) for row in rows):
        raise InvalidArgumentError(f"logprobs.rows {rows} and num_top {num_top} do not describe {len(num_sampled)} rows")
    counts = [num_sampled[row] for row in rows]
    sampled = split(unpack_float32(message.sampled, "logprobs.sampled"), counts, "logprobs.sampled")
    top_counts = [count * top for count, top in zip(counts, num_top, strict=True)]
    ids = split(unpack_int32(message.top_token_ids, "logprobs.top_token_ids"), top_counts, "logprobs.top_token_ids")
    values = split(unpack_float32(message.top_logprobs, "logprobs.top_logprobs"), top_counts, "logprobs.top_logprobs")
    return {
        row: [
            TokenLogprobs(value, list(zip(ids[k][i * top : (i + 1) * top], values[k][i * top : (i + 1) * top], strict=True)))
            for i, value in enumerate(sampled[k])
        ]
        for k, (row, top) in enumerate(zip(rows, num_top, strict=True))
    }
