"""What several services' messages share."""

from typing import Any

from specwire.errors import InvalidArgumentError
from specwire.messages import (
    ConditionalOutcome,
    FeatureHandle,
    Hello,
    Proposals,
    RoundTiming,
    RowStatus,
    SlotRef,
    Welcome,
)
from specwire.sampling_params import SamplingParams
from specwire.v1 import types_pb2 as pb
from specwire.wire.arrays import pack_float32, pack_int32, split, unpack_columns, unpack_float32, unpack_int32

_SCALARS = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logprobs", "max_draft_tokens", "priority",
)  # fmt: skip
"""Sampling parameters that travel as optional scalars under their own name."""


_STATUSES = {status.value: status for status in RowStatus}


def unpack_statuses(data: bytes) -> list[RowStatus]:
    """One RowStatus a byte; InvalidArgumentError for a number that this build does not know."""
    try:
        return list(map(_STATUSES.__getitem__, data))
    except KeyError as error:
        raise InvalidArgumentError(
            f"statuses hold {error.args[0]}, but known row statuses are 1 to {max(_STATUSES)}; run the same version everywhere"
        ) from None


def pack_sampling(params: SamplingParams) -> pb.SamplingParams:
    """Every scalar that is not None is set, so that an explicit 0 arrives as 0."""
    message = pb.SamplingParams(
        stops=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        stop_token_ids=pack_int32(params.stop_token_ids),
    )
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    if params.logit_bias:
        message.logit_bias_token_ids = pack_int32(params.logit_bias.keys())
        message.logit_bias_values = pack_float32(params.logit_bias.values())
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.token_ids = pack_int32(params.allowed_token_ids)
    for word in params.bad_words_token_ids:
        message.bad_words.add(token_ids=pack_int32(word))
    return message


def unpack_sampling(message: pb.SamplingParams) -> SamplingParams:
    """Absent scalars take SamplingParams' defaults, except max_tokens: absent is None, the rest of the context."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    values.setdefault("max_tokens", None)
    bias_ids = unpack_int32(message.logit_bias_token_ids, "logit_bias_token_ids")
    bias_values = unpack_float32(message.logit_bias_values, "logit_bias_values")
    if len(bias_ids) != len(bias_values):
        raise InvalidArgumentError(
            f"logit_bias_token_ids has {len(bias_ids)} values, but logit_bias_values has {len(bias_values)}; send one bias for each id"
        )
    return SamplingParams(
        **values,
        stop=tuple(message.stops),
        include_stop_str_in_output=message.include_stop_str_in_output,
        stop_token_ids=tuple(unpack_int32(message.stop_token_ids, "stop_token_ids")),
        ignore_eos=message.ignore_eos,
        logit_bias=dict(zip(bias_ids, bias_values, strict=True)),
        allowed_token_ids=tuple(unpack_int32(message.allowed_token_ids.token_ids, "allowed_token_ids"))
        if message.HasField("allowed_token_ids")
        else None,
        bad_words_token_ids=tuple(tuple(unpack_int32(word.token_ids, "bad_words")) for word in message.bad_words),
    )


class SamplingPacker:
    """Packs the parameters of one message's sequences. Those of a request's choices are one object, which may have megabytes: packed once."""

    def __init__(self) -> None:
        self._last: tuple[SamplingParams, pb.SamplingParams] | None = None

    def pack(self, params: SamplingParams) -> pb.SamplingParams:
        if self._last is None or self._last[0] is not params:
            self._last = params, pack_sampling(params)
        return self._last[1]


class SamplingReader:
    """Unpacks the parameters of one message's sequences: equal ones that follow each other become one object."""

    def __init__(self) -> None:
        self._last: tuple[pb.SamplingParams, SamplingParams] | None = None

    def unpack(self, message: pb.SamplingParams) -> SamplingParams:
        if self._last is None or self._last[0] != message:
            self._last = message, unpack_sampling(message)
        return self._last[1]


def pack_hello(hello: Hello) -> pb.StreamHello:
    return pb.StreamHello(coordinator_id=hello.coordinator_id, incarnation=hello.incarnation, max_outstanding_rounds=hello.max_outstanding_rounds)


def unpack_hello(message: pb.StreamHello) -> Hello:
    return Hello(message.coordinator_id, message.incarnation, message.max_outstanding_rounds)


def pack_welcome(welcome: Welcome) -> pb.StreamWelcome:
    return pb.StreamWelcome(instance_id=welcome.instance_id, max_outstanding_rounds=welcome.max_outstanding_rounds, free_blocks=welcome.free_blocks)


def unpack_welcome(message: pb.StreamWelcome) -> Welcome:
    return Welcome(message.instance_id, message.max_outstanding_rounds, message.free_blocks)


def pack_timing(timing: RoundTiming) -> pb.RoundTiming:
    return pb.RoundTiming(received_ns=timing.received_ns, started_ns=timing.started_ns, finished_ns=timing.finished_ns, sent_ns=timing.sent_ns)


def unpack_timing(message: pb.RoundTiming) -> RoundTiming:
    return RoundTiming(message.received_ns, message.started_ns, message.finished_ns, message.sent_ns)


def pack_close(close: SlotRef) -> pb.SlotClose:
    return pb.SlotClose(slot=close.slot, epoch=close.epoch)


def unpack_close(message: pb.SlotClose) -> SlotRef:
    return SlotRef(message.slot, message.epoch)


def pack_feature(feature: FeatureHandle) -> pb.FeatureHandle:
    return pb.FeatureHandle(
        session=feature.session,
        slot=feature.slot,
        epoch=feature.epoch,
        feature_set_hash=feature.feature_set_hash,
        source=feature.source,
        new_block_ids=pack_int32(feature.new_block_ids),
        first_position=feature.first_position,
        num_positions=feature.num_positions,
        generation=feature.generation,
        place=feature.place,
        address=feature.address,
        server_name=feature.server_name,
    )


def unpack_feature(message: pb.FeatureHandle) -> FeatureHandle:
    return FeatureHandle(
        message.session,
        message.slot,
        message.epoch,
        message.feature_set_hash,
        message.source,
        unpack_int32(message.new_block_ids, "features.new_block_ids"),
        message.first_position,
        message.num_positions,
        message.generation,
        message.place,
        message.address,
        message.server_name,
    )


def pack_proposals(proposals: Proposals) -> pb.Proposals:
    return pb.Proposals(num_candidates=proposals.num_candidates, token_ids=pack_int32(proposals.token_ids), probs=pack_float32(proposals.probs))


def unpack_proposals(message: pb.Proposals, num_draft_tokens: int) -> Proposals:
    token_ids, probs = unpack_int32(message.token_ids, "proposals.token_ids"), unpack_float32(message.probs, "proposals.probs")
    expected = num_draft_tokens * message.num_candidates
    if len(token_ids) != expected or len(probs) != expected:
        raise InvalidArgumentError(
            f"proposals hold {len(token_ids)} ids and {len(probs)} probabilities, but {num_draft_tokens} drafts x {message.num_candidates} candidates"
            f" need {expected} of each"
        )
    return Proposals(message.num_candidates, token_ids, probs)


def pack_conditional(rows: list[list[ConditionalOutcome]]) -> pb.ConditionalDrafts:
    outcomes = [outcome for row in rows for outcome in row]
    return pb.ConditionalDrafts(
        num_outcomes=pack_int32(map(len, rows)),
        num_accepted=pack_int32(o.num_accepted for o in outcomes),
        next_tokens=pack_int32(o.next_token for o in outcomes),
        num_drafts=pack_int32(len(o.draft_tokens) for o in outcomes),
        draft_tokens=pack_int32(token for o in outcomes for token in o.draft_tokens),
        confidences=pack_float32(score for o in outcomes for score in o.confidences),
    )


def unpack_conditional(message: pb.ConditionalDrafts, num_rows: int) -> list[list[ConditionalOutcome]]:
    num_drafts = unpack_int32(message.num_drafts, "conditional.num_drafts")
    columns = [
        unpack_int32(message.num_accepted, "conditional.num_accepted"),
        unpack_int32(message.next_tokens, "conditional.next_tokens"),
        num_drafts,
    ]
    heads = unpack_columns(("conditional.num_accepted", "conditional.next_tokens", "conditional.num_drafts"), columns)
    drafts = split(unpack_int32(message.draft_tokens, "conditional.draft_tokens"), num_drafts, "conditional.draft_tokens")
    scores = split(unpack_float32(message.confidences, "conditional.confidences"), num_drafts, "conditional.confidences")
    outcomes = [ConditionalOutcome(head[0], head[1], draft, score) for head, draft, score in zip(heads, drafts, scores, strict=True)]
    num_outcomes = unpack_int32(message.num_outcomes, "conditional.num_outcomes")
    if len(num_outcomes) != num_rows:
        raise InvalidArgumentError(
            f"conditional.num_outcomes has {len(num_outcomes)} values, but the round has {num_rows} rows; send one count a row"
        )
    return split(outcomes, num_outcomes, "conditional outcomes")
