"""Which peers may join once requests were admitted for given capacities."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specwire.errors import FailedPreconditionError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription, check_match, check_message_size

if TYPE_CHECKING:
    from .lane import Lane


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
            raise FailedPreconditionError(f"its {name} is {theirs}, but requests were admitted for {ours}; raise it there")


def check_instance(instance_id: str, lanes: "Iterable[Lane]") -> None:
    """Raise FailedPreconditionError if one of these lanes has the verifier already: one process is one lane, however many addresses it has."""
    for lane in lanes:
        if instance_id and lane.instance_id == instance_id:
            raise FailedPreconditionError(f"it is the same process as lane {lane.index}'s verifier {lane.address}; name it once")


def check_drafter(engine: EngineDescription, drafter: ServiceDescription) -> None:
    """Raise FailedPreconditionError unless the drafter's token ids mean what the target's do (padded vocabularies may differ in size), the
    verifiers keep the features that it needs, and a round fits into its messages."""
    check_message_size(engine.max_round_bytes, drafter.max_message_bytes)
    kept = {one.hash: one.name for one in engine.verifier.feature_sets}
    for needed in drafter.feature_sets:
        if needed.hash not in kept:
            have = ", ".join(f"{name} ({number[:12]})" for number, name in kept.items()) or "none"
            raise FailedPreconditionError(
                f"it needs the features of {needed.name} ({needed.hash[:12]}), but the verifiers keep {have}; "
                "start them with --features and that head"
            )
    if drafter.use_heterogeneous_vocab or not drafter.vocab_size:
        return
    verifier = engine.verifier
    ours, theirs = verifier.tokenizer_fingerprint, drafter.tokenizer_fingerprint
    matches = ours == theirs if ours and theirs else verifier.vocab_size == drafter.vocab_size
    if not matches:
        raise FailedPreconditionError(
            f"its tokenizer has fingerprint {theirs or 'none'} and {drafter.vocab_size} ids, but the target's has {ours or 'none'} and "
            f"{verifier.vocab_size}; use a draft model of the target's family"
        )
