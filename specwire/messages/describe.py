"""What services say of themselves, and the tokenizer as it travels."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Projected hidden states that a verifier keeps for draft heads."""

    name: str
    hash: str
    layer_ids: tuple[int, ...]
    width: int
    dtype: str


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """Milliseconds of a verify step of one row without context at each of num_tokens (rising), plus linear terms.

    Args:
        num_tokens, step_ms: of rounds whose rows a graph takes, and beyond max_graph_tokens of others.
        ms_per_kv_token: each token before a row's own ones.
        ms_per_row: each row beyond the first.
        max_graph_tokens: up to so many tokens a step pays for the next measured size; 0 = nothing is padded.
        max_graph_row_tokens: a round with a longer row (a prefill chunk) runs eagerly, and costs chunk_ms; 0 = that makes no difference.
        chunk_num_tokens, chunk_ms: the curve of those rounds, by all of their tokens.
    """

    num_tokens: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()
    ms_per_kv_token: float = 0.0
    ms_per_row: float = 0.0
    max_graph_tokens: int = 0
    max_graph_row_tokens: int = 0
    chunk_num_tokens: tuple[int, ...] = ()
    chunk_ms: tuple[float, ...] = ()


class DraftCost(NamedTuple):
    """Milliseconds of one draft call for num_sequences sequences of K = num_draft_tokens."""

    num_draft_tokens: int
    num_sequences: int
    draft_ms: float


@dataclass(frozen=True, slots=True)
class ServiceDescription:
    """What a verifier or drafter is and can hold. An empty tokenizer_fingerprint means that it has no tokenizer; a drafter
    with vocab_size 0 works on any token ids."""

    model_id: str
    instance_id: str
    vocab_size: int
    max_model_len: int
    max_num_draft_tokens: int
    max_num_seqs: int
    weights_hash: str = ""
    tokenizer_fingerprint: str = ""
    dtype: str = ""
    numerics_version: str = ""
    device: str = ""
    block_size: int = 0
    num_blocks: int = 0
    graph_sizes: tuple[int, ...] = ()
    feature_sets: tuple[FeatureSet, ...] = ()
    verify_cost: VerifyCost = VerifyCost()
    draft_cost: tuple[DraftCost, ...] = ()
    build: str = ""
    method: str = ""
    eos_token_ids: tuple[int, ...] = ()
    max_num_batched_tokens: int = 0
    max_message_bytes: int = 0
    use_heterogeneous_vocab: bool = False
    rejection_sample_method: str = "strict"
    draft_ms_per_kv_token: float = 0.0
    """Of a drafter, beside draft_cost: milliseconds that each token of context adds to each draft position."""
    weights: str = ""
    """Format in which the linear layers' weights are kept: int4, int8, bf16 or fp32; empty where nothing is known of it."""
    draft_chunk_ms: float = 0.0
    """Of a drafter: milliseconds of a chunk of background work, which an answer may have to wait for; 0 = none, or not known."""


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer as it travels: everything a client needs to encode, decode and render chats."""

    tokenizer_json: bytes
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    chat_template: str | None = None
    bos_token_id: int | None = None
    add_bos_token: bool = False
    model_id: str = ""
    max_model_len: int = 0
