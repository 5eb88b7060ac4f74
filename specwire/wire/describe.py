"""What services say of themselves: descriptions with their cost tables, and tokenizers."""

import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from specwire.config_fields import MAX_NUM_SEQS, MAX_NUMBER
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftCost, FeatureSet, ServiceDescription, TokenizerSpec, VerifyCost
from specwire.v1 import types_pb2 as pb
from specwire.wire.arrays import check_columns, pack_float32, pack_int32, unpack_columns, unpack_float32, unpack_int32

_MAX_TOKENIZER_BYTES = 256 << 20
_DESCRIPTION_FIELDS = (
    "model_id", "weights_hash", "vocab_size", "tokenizer_fingerprint", "dtype", "numerics_version", "device", "max_model_len", "block_size",
    "num_blocks", "max_num_draft_tokens", "max_num_seqs", "graph_sizes", "build", "instance_id", "method", "max_num_batched_tokens",
    "max_message_bytes", "use_heterogeneous_vocab", "rejection_sample_method", "weights",
)  # fmt: skip
"""Fields of a description that are alike on both sides."""
_COUNTS = (
    "vocab_size", "max_model_len", "block_size", "num_blocks", "max_num_draft_tokens", "max_num_seqs", "max_num_batched_tokens", "max_message_bytes",
)  # fmt: skip


def pack_description(d: ServiceDescription) -> pb.ServiceDescription:
    return pb.ServiceDescription(
        **{name: getattr(d, name) for name in _DESCRIPTION_FIELDS},
        feature_sets=[pb.FeatureSet(name=f.name, hash=f.hash, layer_ids=f.layer_ids, width=f.width, dtype=f.dtype) for f in d.feature_sets],
        verify_cost=pack_verify_cost(d.verify_cost),
        draft_cost=pack_draft_cost(d.draft_cost, d.draft_ms_per_kv_token, d.draft_chunk_ms),
        eos_token_ids=pack_int32(d.eos_token_ids),
    )


def unpack_description(message: pb.ServiceDescription) -> ServiceDescription:
    values: dict[str, Any] = {name: getattr(message, name) for name in _DESCRIPTION_FIELDS}
    values["graph_sizes"] = tuple(values["graph_sizes"])
    for name in _COUNTS:
        most = MAX_NUM_SEQS if name == "max_num_seqs" else MAX_NUMBER
        if not 0 <= values[name] <= most:
            raise InvalidArgumentError(f"its description has {name} {values[name]}, but it must be from 0 to {most}; is it of this version?")
    return ServiceDescription(
        **values,
        feature_sets=tuple(FeatureSet(f.name, f.hash, tuple(f.layer_ids), f.width, f.dtype) for f in message.feature_sets),
        verify_cost=unpack_verify_cost(message.verify_cost),
        draft_cost=unpack_draft_cost(message.draft_cost),
        eos_token_ids=tuple(unpack_int32(message.eos_token_ids, "eos_token_ids")),
        draft_ms_per_kv_token=message.draft_cost.ms_per_kv_token,
        draft_chunk_ms=message.draft_cost.chunk_ms,
    )


def pack_verify_cost(cost: VerifyCost) -> pb.VerifyCostTable:
    return pb.VerifyCostTable(
        num_tokens=pack_int32(cost.num_tokens),
        step_ms=pack_float32(cost.step_ms),
        ms_per_kv_token=cost.ms_per_kv_token,
        ms_per_row=cost.ms_per_row,
        max_graph_tokens=cost.max_graph_tokens,
        max_graph_row_tokens=cost.max_graph_row_tokens,
        chunk_num_tokens=pack_int32(cost.chunk_num_tokens),
        chunk_ms=pack_float32(cost.chunk_ms),
    )


def pack_draft_cost(costs: Sequence[DraftCost], ms_per_kv_token: float, chunk_ms: float = 0.0) -> pb.DraftCostTable:
    return pb.DraftCostTable(
        num_draft_tokens=pack_int32(cost.num_draft_tokens for cost in costs),
        num_sequences=pack_int32(cost.num_sequences for cost in costs),
        draft_ms=pack_float32(cost.draft_ms for cost in costs),
        ms_per_kv_token=ms_per_kv_token,
        chunk_ms=chunk_ms,
    )


def unpack_draft_cost(message: pb.DraftCostTable) -> tuple[DraftCost, ...]:
    """Without ms_per_kv_token and chunk_ms, which stand by themselves."""
    num_drafts = unpack_int32(message.num_draft_tokens, "draft_cost.num_draft_tokens")
    num_sequences = unpack_int32(message.num_sequences, "draft_cost.num_sequences")
    draft_ms = unpack_float32(message.draft_ms, "draft_cost.draft_ms")
    _check_amounts("draft_cost", (*num_drafts, *num_sequences, *draft_ms, message.ms_per_kv_token, message.chunk_ms))
    columns = unpack_columns(
        ("draft_cost.num_draft_tokens", "draft_cost.num_sequences", "draft_cost.draft_ms"), [num_drafts, num_sequences, draft_ms]
    )
    return tuple(map(DraftCost._make, columns))


def unpack_verify_cost(message: pb.VerifyCostTable) -> VerifyCost:
    num_tokens, step_ms = unpack_int32(message.num_tokens, "verify_cost.num_tokens"), unpack_float32(message.step_ms, "verify_cost.step_ms")
    check_columns(("verify_cost.num_tokens", "verify_cost.step_ms"), [num_tokens, step_ms])
    chunk_num_tokens = unpack_int32(message.chunk_num_tokens, "verify_cost.chunk_num_tokens")
    chunk_ms = unpack_float32(message.chunk_ms, "verify_cost.chunk_ms")
    check_columns(("verify_cost.chunk_num_tokens", "verify_cost.chunk_ms"), [chunk_num_tokens, chunk_ms])
    _check_amounts("verify_cost", (*step_ms, *chunk_ms, message.ms_per_kv_token, message.ms_per_row))
    for sizes in (num_tokens, chunk_num_tokens):
        if any(size <= before for before, size in pairwise((0, *sizes))):
            raise InvalidArgumentError(f"its verify_cost is of {sizes} tokens, but these must rise from 1 on; is it of this version?")
    return VerifyCost(
        num_tokens=tuple(num_tokens),
        step_ms=tuple(step_ms),
        ms_per_kv_token=message.ms_per_kv_token,
        ms_per_row=message.ms_per_row,
        max_graph_tokens=message.max_graph_tokens,
        max_graph_row_tokens=message.max_graph_row_tokens,
        chunk_num_tokens=tuple(chunk_num_tokens),
        chunk_ms=tuple(chunk_ms),
    )


def _check_amounts(table: str, amounts: Iterable[float]) -> None:
    """Raises InvalidArgumentError for what can't have been measured: what is reckoned with it would be nonsense, or a wait without end."""
    for amount in amounts:
        if not 0 <= amount < math.inf:
            raise InvalidArgumentError(f"its {table} has {amount}, but everything in it must be a number of 0 or more; is it of this version?")


def pack_tokenizer(spec: TokenizerSpec) -> pb.TokenizerSpec:
    return pb.TokenizerSpec(
        tokenizer_json_gz=gzip.compress(spec.tokenizer_json, compresslevel=3, mtime=0),
        fingerprint=spec.fingerprint,
        chat_template=spec.chat_template,
        eos_token_ids=pack_int32(spec.eos_token_ids),
        bos_token_id=spec.bos_token_id,
        add_bos_token=spec.add_bos_token,
        model_id=spec.model_id,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
    )


def unpack_tokenizer(message: pb.TokenizerSpec) -> TokenizerSpec:
    inflate = zlib.decompressobj(wbits=31)
    try:
        tokenizer_json = inflate.decompress(message.tokenizer_json_gz, _MAX_TOKENIZER_BYTES)
    except zlib.error as error:
        raise InvalidArgumentError(f"tokenizer_json_gz is not gzip data ({error}); the peer must send a gzip-compressed tokenizer.json") from error
    if inflate.unconsumed_tail or not inflate.eof:
        raise InvalidArgumentError(
            f"tokenizer_json_gz is cut short or inflates past {_MAX_TOKENIZER_BYTES} bytes ({len(tokenizer_json)} read); "
            "send a smaller, whole tokenizer.json"
        )
    return TokenizerSpec(
        tokenizer_json=tokenizer_json,
        fingerprint=message.fingerprint,
        eos_token_ids=tuple(unpack_int32(message.eos_token_ids, "eos_token_ids")),
        vocab_size=message.vocab_size,
        chat_template=message.chat_template if message.HasField("chat_template") else None,
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        add_bos_token=message.add_bos_token,
        model_id=message.model_id,
        max_model_len=message.max_model_len,
    )
