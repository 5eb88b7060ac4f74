"""From the configuration to a verifier: model, KV cache, limits, description, tokenizer."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from specwire.config import VerifierConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.graphs.progress import log_progress
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.memory import allocated_bytes, log_memory
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import NUMERICS_VERSION
from specwire.engine.models.loader import check_device, open_model
from specwire.engine.out_of_memory import explain_out_of_memory
from specwire.engine.runner import ModelRunner, set_num_threads
from specwire.messages import ServiceDescription, TokenizerSpec
from specwire.phases import Phases
from specwire.tokenizer import Tokenizer
from specwire.version import build_version

from .forward import ModelExecutor
from .heads import describe_features, feature_sources
from .profile_timers import profile_verifier
from .round_executor import RoundExecutor
from .sizing import LESS_WORK, make_kv_cache, make_round_runner, max_model_len, wanted_model_len
from .slots import VerifierLimits
from .verifier import Verifier

logger = logging.getLogger(__name__)

_SAMPLING_VERSION = 1
"""Raised whenever a change of sampling or acceptance may change a token of a given logit row."""
_SMALLER_MODEL = "serve a smaller model, or one with dtype bfloat16, or stop what else uses the memory (another process may lower its share)"


@dataclass(frozen=True, slots=True)
class LoadedVerifier:
    """A verifier that is ready to run, and what it tells about itself."""

    verifier: Verifier
    description: ServiceDescription
    tokenizer: TokenizerSpec | None


def load_verifier(config: VerifierConfig, instance_id: str, phases: Phases | None = None) -> LoadedVerifier:
    """Loads the model and measures its step costs; takes seconds to minutes.

    Args:
        phases: of a start that has begun already.

    Raises:
        SpecwireError: naming what is missing or does not fit, and the remedy.
    """
    phases = phases or Phases()
    set_num_threads(config.num_threads)
    check_device(config.device)
    with phases.phase("files"):
        folder = resolve_model(config.model, with_weights=config.load_format != "dummy")
        wanted_model_len(config, ModelConfig.from_folder(folder))  # what is too long is said before weights are loaded
    model_id = Path(config.model).stem if Path(config.model).exists() else config.model
    with phases.phase("tokenizer"):
        tokenizer = _load_tokenizer(config, folder, model_id)
    with phases.phase("weights"), explain_out_of_memory(f"load the weights of {model_id}", config.device, _SMALLER_MODEL):
        model = open_model(
            folder,
            load_format=config.load_format,
            dtype=config.dtype,
            device=config.device,
            weights=config.weights,
            num_rows=config.speculative_config.num_speculative_tokens + 1,
        )
    weights_bytes = allocated_bytes(model.device)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        logger.warning(
            "the tokenizer has %d ids, but the model only %d: requests with the ids above are refused", tokenizer.vocab_size, model.config.vocab_size
        )
    with phases.phase("heads"):
        sources = feature_sources(config, model.config)
    with phases.phase("KV cache"):
        runner = ModelRunner(model, make_kv_cache(config, model, sources))
    limits = _limits(config, runner)
    with phases.phase("capture"), explain_out_of_memory("capture the graphs of all rounds", config.device, LESS_WORK):
        rounds = _make_rounds(config, runner, limits, weights_bytes)
    with phases.phase("profile"), explain_out_of_memory("measure the costs of rounds", config.device, LESS_WORK):
        cost = profile_verifier(runner, rounds, limits, config.profile_context_len)
    executor = ModelExecutor(runner) if rounds is None else RoundExecutor(rounds, runner.kv_cache, limits.max_num_seqs)
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
        graph_sizes=() if rounds is None else tuple(rounds.graph_sizes),
        feature_sets=describe_features(sources),
        verify_cost=cost,
        build=build_version(),
        eos_token_ids=_known_ids(tokenizer.eos_token_ids if tokenizer is not None else model.config.eos_token_ids, limits.vocab_size),
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_message_bytes=config.max_message_mb << 20,
        rejection_sample_method=config.speculative_config.rejection_sample_method,
        weights=model.weights_format,
    )
    logger.info(
        "loaded %s (%s weights %s, %s, %s) in %s",
        model_id, description.weights, model.weights_hash[:12], description.dtype, description.device, phases,
    )  # fmt: skip
    return LoadedVerifier(
        verifier=Verifier(executor, limits, enable_prefix_cache=config.enable_prefix_caching, feature_address=config.feature_address),
        description=description,
        tokenizer=replace(tokenizer, max_model_len=limits.max_model_len) if tokenizer is not None else None,
    )


def _load_tokenizer(config: VerifierConfig, folder: Path, model_id: str) -> TokenizerSpec | None:
    if config.skip_tokenizer:
        logger.info("no tokenizer, as asked for: clients must send token ids, and drafters are checked by the size of their vocabulary only")
        return None
    if not (folder / "tokenizer.json").is_file():
        logger.warning("%s has no tokenizer.json: clients must send token ids, and drafters are not checked for an equal tokenizer", folder)
        return None
    return Tokenizer.from_folder(folder, model_id).to_spec()


def _known_ids(eos_token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Those that the model can emit: tokens that were added to a tokenizer alone end no text."""
    known = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
    if known != eos_token_ids:
        logger.warning("of the EOS ids %s only %s are the model's, whose ids end at %d; the others end no text", eos_token_ids, known, vocab_size - 1)
    return known


def _make_rounds(config: VerifierConfig, runner: ModelRunner, limits: VerifierLimits, weights_bytes: int) -> RoundRunner | None:
    """On CUDA what runs the rounds, its graphs captured; None = the model runner runs them."""
    model, kv_cache = runner.model, runner.kv_cache
    if model.device.type != "cuda":
        return None
    rounds = make_round_runner(config, model, kv_cache, limits.max_model_len)
    rounds.capture(log_progress(logger, "capturing graphs"))
    log_memory({"weights": weights_bytes, **rounds.memory()}, model.device, kv_cache)
    return rounds


def _limits(config: VerifierConfig, runner: ModelRunner) -> VerifierLimits:
    spec = config.speculative_config
    return VerifierLimits(
        vocab_size=runner.model.config.vocab_size,
        max_model_len=max_model_len(config, runner.model, runner.kv_cache),
        max_num_seqs=config.max_num_seqs,
        max_num_draft_tokens=spec.num_speculative_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        synthetic_rates=spec.acceptance_rates() if spec.rejection_sample_method == "synthetic" else None,
        tests_ratio=spec.rejection_sample_method == "probabilistic",
    )
