"""Rounds between coordinator and drafter."""

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat

from specwire.messages import DraftCommit, DraftOpen, DraftResult, DraftRound, DraftRow, DraftRowResult, ServiceDescription
from specwire.v1 import drafter_pb2 as pb
from specwire.wire import common, describe
from specwire.wire.arrays import (
    check_columns,
    make_rows,
    pack_int32,
    pack_int64,
    split,
    unpack_columns,
    unpack_floats,
    unpack_int32,
    unpack_int64,
)

_NO_SCORE, _NO_SCORES = array("f", [float("nan")]), array("f")


def pack_description(description: ServiceDescription) -> pb.DrafterServiceDescribeResponse:
    return pb.DrafterServiceDescribeResponse(description=describe.pack_description(description))


def unpack_description(response: pb.DrafterServiceDescribeResponse) -> ServiceDescription:
    return describe.unpack_description(response.description)


def pack_round(message: DraftRound) -> pb.DraftRequest:
    request = pb.DraftRequest(
        session=message.session, lane=message.lane, round=message.round, traceparents=message.traceparents, sent_ns=message.sent_ns,
        closes=map(common.pack_close, message.closes), opens=map(partial(_pack_open, common.SamplingPacker()), message.opens),
        features=map(common.pack_feature, message.features),
    )  # fmt: skip
    if message.hello is not None:
        request.hello.CopyFrom(common.pack_hello(message.hello))
    if message.commits:
        slots, epochs, base_lens, token_ids = zip(*message.commits, strict=True)
        commits = request.commits
        commits.slots, commits.epochs, commits.base_lens = pack_int32(slots), pack_int32(epochs), pack_int32(base_lens)
        commits.num_tokens = pack_int32(map(len, token_ids))
        commits.token_ids = pack_int32(chain.from_iterable(token_ids))
    if message.rows:
        slots, epochs, base_lens, num_drafts, parent_rounds = zip(*message.rows, strict=True)
        rows = request.rows
        rows.slots, rows.epochs, rows.base_lens = pack_int32(slots), pack_int32(epochs), pack_int32(base_lens)
        rows.num_drafts, rows.parent_rounds = pack_int32(num_drafts), pack_int64(parent_rounds)
    return request


def unpack_round(request: pb.DraftRequest) -> DraftRound:
    commits, rows = request.commits, request.rows
    num_tokens = unpack_int32(commits.num_tokens, "commits.num_tokens")
    heads = unpack_columns(
        ("commits.slots", "commits.epochs", "commits.base_lens", "commits.num_tokens"),
        [
            unpack_int32(commits.slots, "commits.slots"),
            unpack_int32(commits.epochs, "commits.epochs"),
            unpack_int32(commits.base_lens, "commits.base_lens"),
            num_tokens,
        ],
    )
    runs = split(unpack_int32(commits.token_ids, "commits.token_ids"), num_tokens, "commits.token_ids")
    row_heads = unpack_columns(
        ("rows.slots", "rows.epochs", "rows.base_lens", "rows.num_drafts", "rows.parent_rounds"),
        [
            unpack_int32(rows.slots, "rows.slots"),
            unpack_int32(rows.epochs, "rows.epochs"),
            unpack_int32(rows.base_lens, "rows.base_lens"),
            unpack_int32(rows.num_drafts, "rows.num_drafts"),
            unpack_int64(rows.parent_rounds, "rows.parent_rounds"),
        ],
    )
    return DraftRound(
        session=request.session,
        lane=request.lane,
        round=request.round,
        closes=[common.unpack_close(close) for close in request.closes],
        opens=list(map(partial(_unpack_open, common.SamplingReader()), request.opens)),
        commits=make_rows(DraftCommit, [(*head[:3], run) for head, run in zip(heads, runs, strict=True)]),
        features=[common.unpack_feature(feature) for feature in request.features],
        rows=make_rows(DraftRow, row_heads),
        hello=common.unpack_hello(request.hello) if request.HasField("hello") else None,
        traceparents=tuple(request.traceparents),
        sent_ns=request.sent_ns,
    )


def pack_result(result: DraftResult) -> pb.DraftResponse:
    response = pb.DraftResponse(
        session=result.session, lane=result.lane, round=result.round, draining=result.draining, timing=common.pack_timing(result.timing),
    )  # fmt: skip
    if result.rows:
        statuses, slots, epochs, base_lens, drafts, scores, errors = zip(*result.rows, strict=True)
        response.statuses = bytes(statuses)
        response.slots, response.epochs, response.base_lens = pack_int32(slots), pack_int32(epochs), pack_int32(base_lens)
        response.num_drafts, response.draft_tokens = pack_int32(map(len, drafts)), pack_int32(chain.from_iterable(drafts))
        response.confidences = _pack_scores(drafts, scores)
        if any(errors):
            response.errors.extend([pb.DraftRowError(row=index, message=error) for index, error in enumerate(errors) if error])
    if result.welcome is not None:
        response.welcome.CopyFrom(common.pack_welcome(result.welcome))
    if result.proposals is not None:
        response.proposals.CopyFrom(common.pack_proposals(result.proposals))
    if result.conditional is not None:
        response.conditional.CopyFrom(common.pack_conditional(result.conditional))
    return response


def unpack_result(response: pb.DraftResponse) -> DraftResult:
    num_drafts = unpack_int32(response.num_drafts, "num_drafts")
    columns: list[list] = [
        common.unpack_statuses(response.statuses),
        unpack_int32(response.slots, "slots"),
        unpack_int32(response.epochs, "epochs"),
        unpack_int32(response.base_lens, "base_lens"),
    ]
    check_columns(("statuses", "slots", "epochs", "base_lens", "num_drafts"), [*columns, num_drafts])
    drafts = split(unpack_int32(response.draft_tokens, "draft_tokens"), num_drafts, "draft_tokens")
    scores = split(unpack_floats(response.confidences, "confidences"), num_drafts, "confidences") if response.confidences else repeat(_NO_SCORES)
    errors = {error.row: error.message for error in response.errors}
    row_errors = (errors.get(row, "") for row in range(len(drafts))) if errors else repeat("")
    return DraftResult(
        session=response.session,
        lane=response.lane,
        round=response.round,
        rows=make_rows(DraftRowResult, zip(*columns, drafts, scores, row_errors, strict=False)),
        proposals=common.unpack_proposals(response.proposals, sum(num_drafts)) if response.HasField("proposals") else None,
        conditional=common.unpack_conditional(response.conditional, len(drafts)) if response.HasField("conditional") else None,
        timing=common.unpack_timing(response.timing),
        welcome=common.unpack_welcome(response.welcome) if response.HasField("welcome") else None,
        draining=response.draining,
    )


def _pack_scores(drafts: Sequence[list[int]], scores: "Sequence[array[float]]") -> bytes:
    if not any(scores):
        return b""
    return b"".join([own or _NO_SCORE * len(run) for run, own in zip(drafts, scores, strict=True)])


def _pack_open(packer: common.SamplingPacker, message: DraftOpen) -> pb.DraftOpen:
    return pb.DraftOpen(
        slot=message.slot,
        epoch=message.epoch,
        token_ids=pack_int32(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=packer.pack(message.sampling),
        noise_key=message.noise_key,
        choice=message.choice,
        tenant_cache_key=message.tenant_cache_key,
        variant=message.variant,
        request_id=message.request_id,
    )


def _unpack_open(reader: common.SamplingReader, message: pb.DraftOpen) -> DraftOpen:
    return DraftOpen(
        slot=message.slot,
        epoch=message.epoch,
        token_ids=unpack_int32(message.token_ids, "open.token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=reader.unpack(message.sampling),
        noise_key=message.noise_key,
        choice=message.choice,
        tenant_cache_key=message.tenant_cache_key,
        variant=message.variant,
        request_id=message.request_id,
    )
