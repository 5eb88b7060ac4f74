"""From the configuration to a verifier: model, KV cache, limits, description, tokenizer."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specwire.config import VerifierConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import NUMERICS_VERSION, Decoder
from specwire.engine.models.loader import check_device, open_model
from specwire.engine.runner import ModelRunner, set_num_threads
from specwire.errors import InvalidArgumentError
from specwire.messages import ServiceDescription, TokenizerSpec
from specwire.tokenizer import Tokenizer
from specwire.version import build_version

from .executor import Executor
from .forward import ModelExecutor
from .profile import measure_verify_cost
from .round_executor import RoundExecutor
from .slots import VerifierLimits
from .verifier import Verifier

logger = logging.getLogger(__name__)

_SAMPLING_VERSION = 1
"""Raised whenever a change of sampling or acceptance may change a token of a given logit row."""


_PROGRESS_S = 2.0
"""Between two log lines of the capture of graphs."""


@dataclass(frozen=True, slots=True)
class LoadedVerifier:
    """A verifier that is ready to run, and what it tells about itself."""

    verifier: Verifier
    description: ServiceDescription
    tokenizer: TokenizerSpec | None


def load_verifier(config: VerifierConfig, instance_id: str) -> LoadedVerifier:
    """Loads the model and measures its step costs; takes seconds to minutes.

    Raises:
        SpecwireError: naming what is missing or does not fit, and the remedy.
    """
    started = time.monotonic()
    set_num_threads(config.num_threads)
    check_device(config.device)
    folder = resolve_model(config.model)
    model_id = Path(config.model).stem if Path(config.model).exists() else config.model
    tokenizer = _load_tokenizer(folder, model_id)
    model = open_model(folder, load_format=config.load_format, dtype=config.dtype, device=config.device)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        logger.warning(
            "the tokenizer has %d ids, but the model only %d: requests with the ids above are refused", tokenizer.vocab_size, model.config.vocab_size
        )
    runner = ModelRunner(model, _make_kv_cache(config, model))
    limits = _limits(config, runner)
    cost = measure_verify_cost(runner, _max_verify_tokens(limits), limits.max_model_len - 1)
    description = ServiceDescription(
        model_id=model_id,
        instance_id=instance_id,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_draft_tokens=limits.max_num_draft_tokens,
        max_num_seqs=limits.max_num_seqs,
        weights_hash=model.weights_hash,
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer is not None else "",
        dtype=str(model.dtype).removeprefix("torch."),
        numerics_version=f"{NUMERICS_VERSION}.{_SAMPLING_VERSION}",
        device=str(model.device),
        block_size=runner.kv_cache.block_size,
        num_blocks=runner.kv_cache.num_blocks,
        verify_cost=cost,
        build=build_version(),
        eos_token_ids=tokenizer.eos_token_ids if tokenizer is not None else model.config.eos_token_ids,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_message_bytes=config.max_message_mb << 20,
        rejection_sample_method=config.speculative_config.rejection_sample_method,
    )
    logger.info(
        "loaded %s (%s, %s, weights %s) in %.1f s",
        model_id,
        description.dtype,
        description.device,
        model.weights_hash[:12],
        time.monotonic() - started,
    )
    return LoadedVerifier(
        verifier=Verifier(_make_executor(config, runner, limits), limits, enable_prefix_cache=config.enable_prefix_caching),
        description=description,
        tokenizer=replace(tokenizer, max_model_len=limits.max_model_len) if tokenizer is not None else None,
    )


def _load_tokenizer(folder: Path, model_id: str) -> TokenizerSpec | None:
    if not (folder / "tokenizer.json").is_file():
        logger.warning("%s has no tokenizer.json: clients must send token ids, and drafters are not checked for an equal tokenizer", folder)
        return None
    return Tokenizer.from_folder(folder, model_id).to_spec()


def _make_kv_cache(config: VerifierConfig, model: Decoder) -> KVCache:
    bytes_per_block = KVCache.bytes_per_block(model.config, model.dtype)
    num_blocks = config.num_kv_blocks or config.kv_cache_memory // bytes_per_block
    if num_blocks < 1:
        raise InvalidArgumentError(f"kv_cache_memory is {config.kv_cache_memory} bytes, but one KV block takes {bytes_per_block}; raise it")
    return KVCache(model.config, num_blocks, model.dtype, model.device)


def _make_executor(config: VerifierConfig, runner: ModelRunner, limits: VerifierLimits) -> Executor:
    """What runs the rounds: on CUDA the round runner, its graphs captured."""
    if runner.model.device.type != "cuda":
        return ModelExecutor(runner)
    sizes = RoundLimits(limits.max_num_seqs, limits.max_num_draft_tokens, limits.max_num_batched_tokens, limits.max_model_len)
    rounds = RoundRunner(runner.model, runner.kv_cache, sizes, num_in_flight=config.max_outstanding_rounds, use_graphs=config.use_cuda_graphs)
    started = time.monotonic()
    rounds.capture(_progress_log())
    logger.info("captured %d graphs of up to %d tokens in %.1f s", len(rounds.graph_sizes), rounds.graph_sizes[-1], time.monotonic() - started)
    return RoundExecutor(rounds, runner.kv_cache, runner.model.device, limits.max_num_seqs)


def _progress_log() -> Callable[[int, int], None]:
    """Logs how far the capture is, now and then."""
    due = time.monotonic() + _PROGRESS_S

    def log(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_S
            logger.info("captured %d of %d graphs", done, total)

    return log


def _limits(config: VerifierConfig, runner: ModelRunner) -> VerifierLimits:
    spec = config.speculative_config
    return VerifierLimits(
        vocab_size=runner.model.config.vocab_size,
        max_model_len=_max_model_len(config, runner),
        max_num_seqs=config.max_num_seqs,
        max_num_draft_tokens=spec.num_speculative_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        synthetic_rates=spec.acceptance_rates() if spec.rejection_sample_method == "synthetic" else None,
    )


def _max_model_len(config: VerifierConfig, runner: ModelRunner) -> int:
    """As configured or the model's context, clipped to what the KV blocks and one message can hold."""
    context = runner.model.config.max_position_embeddings
    wanted = config.max_model_len or context
    if wanted > context:
        raise InvalidArgumentError(f"max_model_len is {wanted}, but the model's context is {context}; lower it")
    kv_cache = runner.kv_cache
    capacity = kv_cache.num_blocks * kv_cache.block_size
    # One Open carries a whole sequence as int32, and some hundred bytes of parameters.
    message_capacity = ((config.max_message_mb << 20) - 4096) // 4
    length = min(wanted, capacity, message_capacity)
    if length < wanted:
        logger.warning(
            "max_model_len is %d instead of %d: %d KV blocks of %d tokens hold %d, a message of %d MiB %d; raise kv_cache_memory or max_message_mb",
            length, wanted, kv_cache.num_blocks, kv_cache.block_size, capacity, config.max_message_mb, message_capacity,
        )  # fmt: skip
    if length < 2:
        raise InvalidArgumentError(f"max_model_len is {length}, but a prompt token and an output token need 2; raise it")
    return length


def _max_verify_tokens(limits: VerifierLimits) -> int:
    """Most tokens of a step in which every sequence verifies K_max drafts."""
    return min(limits.max_num_batched_tokens, limits.max_num_seqs * (limits.max_num_draft_tokens + 1))
