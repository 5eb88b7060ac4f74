"""Keys of speculative configurations elsewhere that have no meaning here: taken where they ask for nothing, else refused with what to do instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specwire.errors import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key that is no field.

    Args:
        remedy: what to do instead of setting it.
        neutral: values that ask for nothing, beside null.
        is_unbuilt: it is not built yet; else it never will be.
    """

    remedy: str
    neutral: tuple[Any, ...] = ()
    is_unbuilt: bool = False


_SAMPLING = ForeignKey("it belongs to the sampling parameters of a request")
_INTERNAL = ForeignKey("it is made of other keys; leave it out")
_ONE_BACKEND = ForeignKey("each device has one; leave it out", ("auto",))
_LOSSY = ForeignKey("drafts are accepted only where the text stays what the target alone would have written; leave it out")

FOREIGN_KEYS: Mapping[str, ForeignKey] = {
    "tensor_parallel_size": ForeignKey("that of drafts would be 'draft_tensor_parallel_size', and the target's is in the section verifier"),
    "draft_tensor_parallel_size": ForeignKey("a drafter runs on one device; leave it out, and start more drafters for more sequences", (1,), True),
    "draft_pipeline_parallel_size": ForeignKey("a drafter runs on one device; leave it out", (1,), True),
    "enforce_eager": ForeignKey("set use_cuda_graphs to false in the section of the service that is meant", (False,)),
    "quantization": ForeignKey("name a checkpoint in the format that is wanted as model", (), True),
    "moe_backend": _ONE_BACKEND,
    "attention_backend": _ONE_BACKEND,
    "kv_cache_dtype": ForeignKey("a draft model's is that of its weights; leave it out", ("auto",), True),
    "revision": ForeignKey("name a folder that holds this revision as model"),
    "code_revision": ForeignKey("no code of checkpoints is run; leave it out"),
    "draft_load_config": ForeignKey("set load_format in the section drafter"),
    "disable_padded_drafter_batch": ForeignKey("drafters pad no batches; leave it out", (False,)),
    "use_local_argmax_reduction": ForeignKey("a drafter runs on one device; leave it out", (False,)),
    "index_share_for_mtp_iteration": ForeignKey("leave it out: mtp here is one layer that keeps no such indices", (False,)),
    "disable_eagle_block_drop": ForeignKey("no block of a head is dropped; leave it out", (False, True)),
    "fly_window_size": _LOSSY,
    "fly_entropy_threshold": _LOSSY,
    "acceptance_method": ForeignKey("its name is 'rejection_sample_method'"),
    "posterior_threshold": _LOSSY,
    "posterior_alpha": _LOSSY,
    "typical_acceptance_sampler_posterior_threshold": _LOSSY,
    "typical_acceptance_sampler_posterior_alpha": _LOSSY,
    "disable_by_batch_size": ForeignKey("write K = 0 from that batch size on into 'num_speculative_tokens_per_batch_size'"),
    "disable_logprobs": ForeignKey("logprobs are given to the requests that ask for them; leave it out"),
    "speculative_token_tree": ForeignKey("drafts are chains; leave it out", (), True),
    "num_lookahead_slots": ForeignKey("it follows from 'num_speculative_tokens'; leave it out"),
    "target_model_config": _INTERNAL,
    "target_parallel_config": _INTERNAL,
    "draft_model_config": _INTERNAL,
    "draft_parallel_config": _INTERNAL,
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "max_draft_tokens"), _SAMPLING),
}
"""By name."""


def check_foreign_key(name: str, value: Any) -> None:
    """Raise InvalidArgumentError or UnsupportedError unless the value of a foreign key asks for nothing."""
    key = FOREIGN_KEYS[name]
    if value is None or any(isinstance(value, bool) == isinstance(neutral, bool) and value == neutral for neutral in key.neutral):
        return
    if key.is_unbuilt:
        raise UnsupportedError(f"{name} is {value!r}, but that is not built; {key.remedy}")
    raise InvalidArgumentError(f"{name} is {value!r}, but there is no such key here; {key.remedy}")
