"""What the services together can hold: capacities clipped to the smallest, and the effective schedule. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import ServiceDescription
from specwire.policy.schedule import dense_schedule, describe_clipping, schedule_ranges
from specwire.proposals import BYTES_PER_DRAFT

_MATCHING = ("weights_hash", "dtype", "numerics_version", "vocab_size", "tokenizer_fingerprint", "rejection_sample_method", "eos_token_ids")
_BYTES_PER_TOKEN = 4
_BYTES_PER_ROW = 128  # with the traceparent that it may have
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
        max_round_bytes: most bytes of a round whose requests have few parameters.
        max_parameter_bytes: most bytes of a request's parameters, such that a round fits that opens as many sequences as there may be.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    schedule: tuple[int, ...]
    reasons: tuple[str, ...]
    verifier: ServiceDescription
    max_round_bytes: int
    max_parameter_bytes: int

    @property
    def model_id(self) -> str:
        return self.verifier.model_id

    @property
    def vocab_size(self) -> int:
        return self.verifier.vocab_size

    @property
    def schedule_ranges(self) -> list[tuple[int, int, int]]:
        """The schedule as the fewest ranges (start, end, K)."""
        return schedule_ranges(self.schedule)


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
    if verifiers[0].rejection_sample_method == "probabilistic":
        num_bytes += min(max_num_seqs * num_speculative_tokens, max_num_batched_tokens) * BYTES_PER_DRAFT
    max_message_bytes = min([config.max_message_mb << 20, *(v.max_message_bytes for v in verifiers if v.max_message_bytes)])
    check_message_size(num_bytes, max_message_bytes)
    return EngineDescription(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        schedule=tuple(dense_schedule(schedule, num_speculative_tokens, max_num_seqs)),
        reasons=tuple(reasons),
        verifier=verifiers[0],
        max_round_bytes=num_bytes,
        max_parameter_bytes=_BYTES_PER_OPEN + (max_message_bytes - num_bytes) // max_num_seqs,
    )


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
    if {one.hash for one in reference.feature_sets} != {one.hash for one in other.feature_sets}:
        theirs, ours = (", ".join(one.name for one in service.feature_sets) or "none" for service in (other, reference))
        raise FailedPreconditionError(
            f"it keeps features of these heads: {theirs}, but the first verifier: {ours}; give all verifiers of a coordinator the same --features"
        )


def _clip(name: str, configured: int, limits: list[int], reasons: list[str], *, may_be_zero: bool = False) -> int:
    """The smallest positive one; 0 stands for no limit unless may_be_zero."""
    given = [limit for limit in limits if limit or may_be_zero]
    clipped = min([*given, configured] if configured else given)
    if configured and clipped < configured:
        reasons.append(f"{name} clipped from {configured} to {clipped}: a verifier takes no more")
    return clipped


def _round_bytes(max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """A round opens at most as many prompt tokens as it computes, and two more prompts that it begins: the oldest one, and the last one that has
    a share."""
    return (2 * max_model_len + max_num_batched_tokens) * _BYTES_PER_TOKEN + max_num_seqs * (_BYTES_PER_ROW + _BYTES_PER_OPEN)
