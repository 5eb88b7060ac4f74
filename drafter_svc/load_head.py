"""Loads the draft head that the configuration names."""

import logging

from specwire.config import DrafterConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.graphs.progress import log_progress
from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.calibration import read_calibration
from specwire.engine.heads.eagle3 import Eagle3Head
from specwire.engine.heads.load import LoadedHead, load_head
from specwire.engine.heads.sharpness import read_sharpness
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.memory import CPU_KV_BYTES, MemoryNeeds, allocated_bytes, decide_kv_cache_bytes, read_device_memory
from specwire.engine.models.decoder import NUMERICS_VERSION
from specwire.engine.models.loader import check_device
from specwire.engine.out_of_memory import explain_out_of_memory
from specwire.engine.runner import set_num_threads
from specwire.errors import InvalidArgumentError
from specwire.messages import FeatureSet, ServiceDescription
from specwire.phases import Phases

from .block import BlockForward
from .device_forward import DeviceForward
from .draft_head import DraftHead, Features
from .drawn import wanted_candidates
from .features import FeatureReader
from .head_forward import HeadForward
from .load import count_blocks, read_fingerprint
from .sequential import SequentialForward

logger = logging.getLogger(__name__)

_SMALLER_HEAD = "take dtype bfloat16, or lower gpu_memory_utilization or kv_cache_memory of the verifier on this device"


def load_draft_head(config: DrafterConfig, phases: Phases | None = None) -> DraftHead:
    """Loads weights and allocates KV blocks, on the thread that will run the head.

    Args:
        phases: of a start that has begun already.

    Raises:
        SpecwireError: the head is missing, not supported, or for another method or target; kv_cache_memory holds no sequence, or the device's
            memory does not suffice.
    """
    spec, phases = config.speculative_config, phases or Phases()
    name = spec.model or config.target_model
    assert spec.model_method is not None, f"method is {spec.method}"
    if not name:
        raise InvalidArgumentError("method is mtp, but neither model nor the drafter's target_model is set; name the target, which has the MTP layer")
    if config.load_format == "dummy":
        logger.warning("load_format is dummy, but only targets and draft models have made-up weights: the head %s has those of its files", name)
    candidates = wanted_candidates(config)
    set_num_threads(config.num_threads)
    check_device(config.device)
    with phases.phase("files"):
        folder = resolve_model(name, is_head=True)
        target = resolve_model(config.target_model) if config.target_model else None
        fingerprint = read_fingerprint(config, target or folder)
    with phases.phase("weights"), explain_out_of_memory(f"load the weights of the draft head {name}", config.device, _SMALLER_HEAD):
        loaded = load_head(
            folder, spec.model_method, target=target, max_model_len=spec.max_model_len, dtype=config.dtype, device=config.device,
            weights=config.weights, draft_top_k=spec.dspark_draft_topk,
        )  # fmt: skip
    with phases.phase("KV cache"):
        bytes_per_block = KVCache.bytes_per_block(loaded.config.layers, loaded.dtype)
        num_blocks = count_blocks(config, _kv_bytes(config, loaded, bytes_per_block), bytes_per_block, loaded.max_model_len)
        sharpness = read_sharpness(loaded.config) if spec.draft_sharpness is None else spec.draft_sharpness
        drafter = head_drafter(
            loaded,
            FeatureReader.from_config(config, loaded.source),
            num_blocks=num_blocks,
            max_num_drafts=spec.num_speculative_tokens,
            max_num_seqs=config.max_num_seqs,
            greedy=spec.draft_sample_method == "greedy",
            sharpness=sharpness,
            num_candidates=candidates,
            max_chunk=config.prefill_chunk,
            use_graphs=config.use_cuda_graphs,
            model_id=name,
            tokenizer_fingerprint=fingerprint,
        )
    dtype, vocabulary = drafter.description.dtype, loaded.head.vocabulary
    if loaded.is_tiled:
        dtype += f", weights of 8 bits in compiled passes, drafting {vocabulary.num_drafted} of {vocabulary.size} ids"
    logger.info("loaded %s (%s, %s) with %d KV blocks of %d tokens in %s", name, dtype, loaded.device, num_blocks, BLOCK_SIZE, phases)
    return drafter


def _kv_bytes(config: DrafterConfig, loaded: LoadedHead, bytes_per_block: int) -> int:
    """Memory for the KV cache: as configured, or what this process's share of a CUDA device leaves."""
    if config.kv_cache_memory or loaded.device.type != "cuda":
        return config.kv_cache_memory or CPU_KV_BYTES
    shape, block = loaded.config.layers, config.speculative_config.num_speculative_tokens + 1
    # Some float32 tensors of the widest kinds at once: rows of layers, and logits with what drawing makes of them.
    rows = config.prefill_chunk + config.max_num_seqs * (block + 16)
    widths = 4 * shape.hidden_size + 3 * shape.intermediate_size + 3 * shape.num_heads * shape.head_dim
    activations = 4 * (rows * widths + 6 * config.max_num_seqs * block * shape.vocab_size)
    needs = MemoryNeeds(allocated_bytes(loaded.device), 0, activations, 0)
    return decide_kv_cache_bytes(needs, read_device_memory(loaded.device), config.gpu_memory_utilization, bytes_per_block)


def head_drafter(
    loaded: LoadedHead,
    features: Features,
    *,
    num_blocks: int,
    max_num_drafts: int,
    max_num_seqs: int,
    greedy: bool = False,
    sharpness: float = 1.0,
    num_candidates: int = 0,
    max_chunk: int = 256,
    use_graphs: bool = True,
    model_id: str = "",
    tokenizer_fingerprint: str = "",
) -> DraftHead:
    """A drafting method over a head with a KV cache of its own.

    Args:
        features: where they come from.
        num_blocks: of the KV cache.
        max_num_drafts: most drafts at once (K).
        max_num_seqs: most sequences; their numbers are below it.
        greedy: draft by argmax whatever the request's temperature.
        sharpness: multiplies the logits before noise.
        num_candidates: see `HeadSampler`; 0 on a GPU.
        max_chunk: most rows of one pass without drafts, on a GPU.
        use_graphs: on a GPU, capture what can be captured.

    Raises:
        InvalidArgumentError: the head can't draft that many.
        ResourceExhaustedError: the device has no memory for that many blocks.
    """
    config, source = loaded.config, loaded.source
    dtype = str(loaded.dtype).removeprefix("torch.")
    kv_cache = KVCache(config.layers, num_blocks, loaded.dtype, loaded.device)
    description = ServiceDescription(
        model_id=model_id or config.name,
        instance_id="",
        vocab_size=config.layers.vocab_size,
        max_model_len=loaded.max_model_len,
        max_num_draft_tokens=max_num_drafts,
        max_num_seqs=max_num_seqs,
        weights_hash=loaded.weights_hash,
        tokenizer_fingerprint=tokenizer_fingerprint,
        dtype=dtype,
        numerics_version=str(NUMERICS_VERSION),
        device=str(loaded.device),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        method=config.method,
        feature_sets=(FeatureSet(source.name, source.hash, source.layer_ids, source.width, str(source.dtype).removeprefix("torch.")),),
    )
    has_confidences = isinstance(loaded.head, BlockHead) and loaded.head.confidence is not None
    forward = _make_forward(
        loaded, kv_cache, max_num_seqs=max_num_seqs, max_num_drafts=max_num_drafts, max_chunk=max_chunk, use_graphs=use_graphs,
        num_candidates=num_candidates,
    )  # fmt: skip
    return DraftHead(
        forward,
        features,
        source.width,
        description,
        greedy=greedy,
        sharpness=sharpness,
        calibration=None if has_confidences else read_calibration(config),
    )


def _make_forward(
    loaded: LoadedHead,
    kv_cache: KVCache,
    *,
    max_num_seqs: int,
    max_num_drafts: int,
    max_chunk: int,
    use_graphs: bool,
    num_candidates: int,
) -> HeadForward:
    """What suits the head and its device."""
    if isinstance(loaded.head, BlockHead):
        most = loaded.head.num_queries - loaded.head.first_draft
        if max_num_drafts > most:
            raise InvalidArgumentError(
                f"num_speculative_tokens is {max_num_drafts}, but the head {loaded.config.name} drafts blocks of {most}; lower it to at most {most}"
            )
    if loaded.device.type != "cuda":
        if isinstance(loaded.head, BlockHead):
            return BlockForward(loaded.head, loaded.config.layers, kv_cache, num_candidates)
        if loaded.is_tiled and isinstance(loaded.head, Eagle3Head) and not num_candidates:
            from .tiled_head import TiledHeadForward  # brings a compiler

            return TiledHeadForward(loaded.head, loaded.config.layers, kv_cache, max_num_drafts)
        return SequentialForward(loaded.head, loaded.config.layers, kv_cache, num_candidates)
    assert not num_candidates, f"{num_candidates} candidates on {loaded.device}"
    forward = DeviceForward(
        loaded.head,
        loaded.config.layers,
        loaded.source.width,
        kv_cache,
        max_num_seqs=max_num_seqs,
        max_num_drafts=max_num_drafts,
        max_model_len=loaded.max_model_len,
        max_chunk=max_chunk,
        use_graphs=use_graphs,
    )
    forward.capture(log_progress(logger, "capturing graphs"))
    return forward
