"""Loads the draft model that the configuration names."""

import logging
from pathlib import Path

from specwire.config import DrafterConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.progress import log_progress
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.memory import CPU_KV_BYTES, allocated_bytes, decide_kv_cache_bytes, log_memory, measure_needs, read_device_memory
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import check_device, open_model
from specwire.engine.out_of_memory import explain_out_of_memory
from specwire.engine.runner import ModelRunner, set_num_threads
from specwire.errors import InvalidArgumentError
from specwire.phases import Phases
from specwire.tokenizer import Tokenizer

from .draft_model import DraftModel
from .drawn import wanted_candidates
from .forward import DraftForward, EagerForward, make_forward
from .parallel import ParallelForward, read_mask_token_id
from .vocab_mapping import VocabMapping, read_mapping

logger = logging.getLogger(__name__)

_SMALLER_MODEL = "take a smaller draft model or dtype bfloat16, or lower gpu_memory_utilization or kv_cache_memory of the verifier on this device"
_LESS_WORK = "lower the drafter's max_num_seqs, prefill_chunk or num_speculative_tokens; lower its kv_cache_memory or gpu_memory_utilization if set"


def load_draft_model(config: DrafterConfig, phases: Phases | None = None) -> DraftModel:
    """Loads weights, allocates KV blocks and, on CUDA, captures graphs, on the thread that will run the model.

    Args:
        phases: of a start that has begun already.

    Raises:
        SpecwireError: the model is missing or not supported, kv_cache_memory holds no sequence, or the device's memory does not suffice.
    """
    spec, phases = config.speculative_config, phases or Phases()
    assert spec.model is not None, "a configuration with method draft_model names its model"
    set_num_threads(config.num_threads)
    check_device(config.device)
    with phases.phase("files"):
        folder = resolve_model(spec.model, with_weights=config.load_format != "dummy")
        # A draft model with a vocabulary of its own speaks to others in the target's.
        fingerprint = read_fingerprint(config, _target_folder(config) if spec.use_heterogeneous_vocab else folder)
    with phases.phase("weights"), explain_out_of_memory(f"load the weights of the draft model {spec.model}", config.device, _SMALLER_MODEL):
        model = open_model(
            folder,
            load_format=config.load_format,
            dtype=config.dtype,
            device=config.device,
            weights=config.weights,
            num_rows=spec.num_speculative_tokens + 1,
        )
    weights_bytes = allocated_bytes(model.device)
    context = model.config.max_position_embeddings
    max_model_len = min(spec.max_model_len or context, context)
    with phases.phase("KV cache"):
        num_blocks = _num_blocks(config, model, max_model_len)
        kv_cache = KVCache(model.config, num_blocks, model.dtype, model.device)
    with phases.phase("capture"), explain_out_of_memory("capture the draft model's graphs", config.device, _LESS_WORK):
        mapping = _read_mapping(config, folder, model)
        forward = _eager_forward(config, folder, model, kv_cache, mapping) or _make_forward(config, model, kv_cache, max_model_len)
        if isinstance(forward, DraftRunner):
            forward.capture(log_progress(logger, "capturing graphs"))
            log_memory({"weights": weights_bytes}, model.device, kv_cache)
    dtype = str(model.dtype).removeprefix("torch.")
    logger.info("loaded %s (%s, %s) with %d KV blocks of %d tokens in %s", spec.model, dtype, model.device, num_blocks, BLOCK_SIZE, phases)
    return DraftModel(
        model,
        forward,
        num_blocks=num_blocks,
        max_num_drafts=spec.num_speculative_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        greedy=spec.draft_sample_method == "greedy",
        sharpness=spec.draft_sharpness or 1.0,
        feeds_drafts=not spec.parallel_drafting,
        vocab_size=mapping.size if mapping is not None else None,
        model_id=spec.model,
        tokenizer_fingerprint=fingerprint,
    )


def read_fingerprint(config: DrafterConfig, folder: Path) -> str:
    """Of a folder's tokenizer; empty without one."""
    if config.skip_tokenizer:
        logger.info("no tokenizer, as asked for: whether ids are the target's is seen by the size of the vocabulary only")
        return ""
    if not (folder / "tokenizer.json").is_file():
        logger.warning("%s has no tokenizer.json: whether its ids are the target's is not checked", folder)
        return ""
    return Tokenizer.from_folder(folder).fingerprint


def _target_folder(config: DrafterConfig) -> Path:
    if not config.target_model:
        raise InvalidArgumentError("use_heterogeneous_vocab is true, but target_model is not set; name the target, whose tokenizer is compared")
    return resolve_model(config.target_model, with_weights=False)


def _read_mapping(config: DrafterConfig, folder: Path, model: Decoder) -> VocabMapping | None:
    """For a draft model with a tokenizer of its own."""
    if not config.speculative_config.use_heterogeneous_vocab:
        return None
    target = _target_folder(config)
    return read_mapping(folder, target, model.config.vocab_size, ModelConfig.from_folder(target).vocab_size, model.config.eos_token_ids)


def _eager_forward(
    config: DrafterConfig, folder: Path, model: Decoder, kv_cache: KVCache, mapping: VocabMapping | None
) -> EagerForward | ParallelForward | None:
    """What runs a draft model with mask tokens, with a vocabulary of its own, or with private noise; None for others."""
    is_parallel, candidates = config.speculative_config.parallel_drafting, wanted_candidates(config)
    if not is_parallel and mapping is None and not candidates:
        return None
    if model.device.type == "cuda" and config.use_cuda_graphs:
        logger.warning("the draft model runs kernel by kernel: no graphs are captured with parallel_drafting or use_heterogeneous_vocab")
    eager = EagerForward(ModelRunner(model, kv_cache), mapping, candidates)
    return ParallelForward(eager, read_mask_token_id(folder, model.config.vocab_size)) if is_parallel else eager


def _make_forward(config: DrafterConfig, model: Decoder, kv_cache: KVCache, max_model_len: int) -> DraftForward:
    """What runs the draft model; on CUDA not captured yet."""
    return make_forward(
        model,
        kv_cache,
        max_num_seqs=config.max_num_seqs,
        max_num_drafts=config.speculative_config.num_speculative_tokens,
        max_model_len=max_model_len,
        max_chunk=config.prefill_chunk,
        use_graphs=config.use_cuda_graphs,
    )


def _num_blocks(config: DrafterConfig, model: Decoder, max_model_len: int) -> int:
    bytes_per_block = KVCache.bytes_per_block(model.config, model.dtype)
    return count_blocks(config, _kv_bytes(config, model, max_model_len, bytes_per_block), bytes_per_block, max_model_len)


def count_blocks(config: DrafterConfig, num_bytes: int, bytes_per_block: int, max_model_len: int) -> int:
    """As many blocks as the memory holds, but not more than all sequences at full length need.

    Raises:
        InvalidArgumentError: they hold no sequence to speak of.
    """
    blocks_per_sequence = -(-max_model_len // BLOCK_SIZE)
    num_blocks = min(num_bytes // bytes_per_block, config.max_num_seqs * blocks_per_sequence)
    if num_blocks < min(blocks_per_sequence, 2):
        raise InvalidArgumentError(
            f"kv_cache_memory is {num_bytes} bytes, which is {num_blocks} KV blocks of {bytes_per_block} bytes; "
            f"give at least {2 * bytes_per_block} ({blocks_per_sequence * bytes_per_block} hold one sequence of {max_model_len} tokens)"
        )
    if num_blocks < blocks_per_sequence:
        logger.warning("%d KV blocks hold no sequence of %d tokens: long sequences get no drafts", num_blocks, max_model_len)
    return num_blocks


def _kv_bytes(config: DrafterConfig, model: Decoder, max_model_len: int, bytes_per_block: int) -> int:
    """Memory for the KV cache: as configured, or what this process's share of a CUDA device leaves."""
    if config.kv_cache_memory or model.device.type != "cuda":
        return config.kv_cache_memory or CPU_KV_BYTES

    def make_runner(kv_cache: KVCache) -> DraftRunner:
        runner = _make_forward(config, model, kv_cache, max_model_len)
        assert isinstance(runner, DraftRunner), f"{type(runner).__name__} on {model.device}"
        return runner

    with explain_out_of_memory("run the draft model's largest batch, even without a KV cache,", model.device, _LESS_WORK):
        needs = measure_needs(model, make_runner)
    return decide_kv_cache_bytes(needs, read_device_memory(model.device), config.gpu_memory_utilization, bytes_per_block)
