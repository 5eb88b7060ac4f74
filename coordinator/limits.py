"""What the lanes together can hold: capacities clipped to the smallest, the effective schedule, and which peers match."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import ServiceDescription
from specwire.policy.schedule import dense_schedule, describe_clipping

logger = logging.getLogger(__name__)

_MATCHING = ("weights_hash", "dtype", "numerics_version", "vocab_size", "tokenizer_fingerprint", "rejection_sample_method", "eos_token_ids")
_BYTES_PER_TOKEN = 4
_BYTES_PER_ROW = 64
_BYTES_PER_OPEN = 4096


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Capacities that hold on every lane, the effective schedule, and why they are less than configured.

    Args:
        max_model_len: most tokens of a sequence, prompt and output.
        max_num_seqs: most running sequences a lane.
        max_num_batched_tokens: most tokens a round.
        num_speculative_tokens: K, the ceiling.
        schedule: K by the number of sequences that sample in a step; index 0 is never used.
        reasons: one sentence for each number that was clipped.
        verifier: the description that every lane must match.
        max_round_bytes: most bytes of a round.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    schedule: tuple[int, ...]
    reasons: tuple[str, ...]
    verifier: ServiceDescription
    max_round_bytes: int

    @property
    def model_id(self) -> str:
        return self.verifier.model_id

    @property
    def vocab_size(self) -> int:
        return self.verifier.vocab_size

    @property
    def schedule_ranges(self) -> list[list[int]]:
        """The schedule as [[start, end, K], ...]."""
        ranges: list[list[int]] = []
        for batch_size, k in enumerate(self.schedule[1:], start=1):
            if ranges and ranges[-1][2] == k:
                ranges[-1][1] = batch_size
            else:
                ranges.append([batch_size, batch_size, k])
        return ranges


def describe_engine(config: CoordinatorConfig, verifiers: Sequence[ServiceDescription]) -> EngineDescription:
    """Clips to the smallest of the configuration and the verifiers.

    Raises:
        FailedPreconditionError: the verifiers do not match each other, or messages of this size do not fit.
    """
    for other in verifiers[1:]:
        check_match(verifiers[0], other)
    reasons: list[str] = []
    context = min(v.max_model_len for v in verifiers)
    max_model_len = min([context, *(v.num_blocks * v.block_size for v in verifiers if v.num_blocks)])
    if max_model_len < context:
        reasons.append(f"max_model_len clipped from {context} to {max_model_len}: the KV cache holds no longer sequence")
    max_num_batched_tokens = _clip("max_num_batched_tokens", config.max_num_batched_tokens, [v.max_num_batched_tokens for v in verifiers], reasons)
    max_num_seqs = _clip("max_num_seqs", config.max_num_seqs, [v.max_num_seqs for v in verifiers], reasons)
    if max_num_seqs > max_num_batched_tokens:
        reasons.append(f"max_num_seqs clipped from {max_num_seqs} to {max_num_batched_tokens}: each takes a token of max_num_batched_tokens")
        max_num_seqs = max_num_batched_tokens
    speculative = config.speculative_config
    num_speculative_tokens = 0
    if config.drafters and speculative.method is not None:
        limits = [v.max_num_draft_tokens for v in verifiers]
        num_speculative_tokens = _clip("num_speculative_tokens", speculative.num_speculative_tokens, limits, reasons, may_be_zero=True)
    schedule = speculative.num_speculative_tokens_per_batch_size
    reasons += describe_clipping(schedule, num_speculative_tokens, max_num_seqs) if num_speculative_tokens else []
    num_bytes = _round_bytes(max_model_len, max_num_batched_tokens, max_num_seqs)
    for limit in (config.max_message_mb << 20, *(v.max_message_bytes for v in verifiers)):
        check_message_size(num_bytes, limit)
    table = dense_schedule(schedule, num_speculative_tokens, max_num_seqs)
    return EngineDescription(
        max_model_len, max_num_seqs, max_num_batched_tokens, num_speculative_tokens, tuple(table), tuple(reasons), verifiers[0], num_bytes
    )  # fmt: skip


def check_message_size(num_bytes: int, limit: int) -> None:
    """Raise FailedPreconditionError if a round of so many bytes passes a peer's limit; 0 stands for an unknown one."""
    if limit and num_bytes > limit:
        raise FailedPreconditionError(
            f"a round can take {num_bytes} bytes, but messages may have {limit}; raise max_message_mb on both sides, or lower max_model_len"
        )


def check_match(reference: ServiceDescription, other: ServiceDescription) -> None:
    """Raise FailedPreconditionError unless both verifiers give the same tokens."""
    for name in _MATCHING:
        ours, theirs = getattr(reference, name), getattr(other, name)
        if ours != theirs:
            raise FailedPreconditionError(
                f"its {name} is {theirs!r}, but the first verifier's is {ours!r}; all verifiers of a coordinator must serve the same model alike"
            )


def check_lane(description: EngineDescription, verifier: ServiceDescription) -> None:
    """Raise FailedPreconditionError unless a verifier can take any sequence that was or will be admitted."""
    check_match(description.verifier, verifier)
    blocks_len = verifier.num_blocks * verifier.block_size if verifier.num_blocks else verifier.max_model_len
    for name, ours, theirs in (
        ("max_model_len", description.max_model_len, verifier.max_model_len),
        ("KV cache (in tokens)", description.max_model_len, blocks_len),
        ("max_num_seqs", description.max_num_seqs, verifier.max_num_seqs),
        ("max_num_batched_tokens", description.max_num_batched_tokens, verifier.max_num_batched_tokens),
        ("max_num_draft_tokens", description.num_speculative_tokens, verifier.max_num_draft_tokens),
    ):
        if theirs < ours:
            raise FailedPreconditionError(
                f"its {name} is {theirs}, but requests were admitted for {ours}; raise it there, or restart the coordinator to clip to it"
            )


def check_drafter(verifier: ServiceDescription, drafter: ServiceDescription) -> None:
    """Raise FailedPreconditionError unless the drafter's token ids mean what the target's do; padded vocabularies may differ in size."""
    if drafter.use_heterogeneous_vocab or not drafter.vocab_size:
        return
    ours, theirs = verifier.tokenizer_fingerprint, drafter.tokenizer_fingerprint
    matches = ours == theirs if ours and theirs else verifier.vocab_size == drafter.vocab_size
    if not matches:
        raise FailedPreconditionError(
            f"its tokenizer has fingerprint {theirs or 'none'} and {drafter.vocab_size} ids, but the target's has {ours or 'none'} and "
            f"{verifier.vocab_size}; use a draft model of the target's family"
        )


def _clip(name: str, configured: int, limits: list[int], reasons: list[str], *, may_be_zero: bool = False) -> int:
    """The smallest positive one; 0 stands for no limit unless may_be_zero."""
    given = [limit for limit in limits if limit or may_be_zero]
    clipped = min([*given, configured] if configured else given)
    if configured and clipped < configured:
        reasons.append(f"{name} clipped from {configured} to {clipped}: a verifier takes no more")
    return clipped


def _round_bytes(max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """A round opens at most as many prompt tokens as it computes, and one more prompt that it begins."""
    return (max_model_len + max_num_batched_tokens) * _BYTES_PER_TOKEN + max_num_seqs * (_BYTES_PER_ROW + _BYTES_PER_OPEN)
