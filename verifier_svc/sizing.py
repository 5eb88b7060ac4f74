"""What a verifier has room for: KV blocks, the longest sequence, and the rounds that its runner is made for."""

import logging
from collections.abc import Sequence

from specwire.config import VerifierConfig
from specwire.engine.features.pages import make_pool
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.heads.source import FeatureSource
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.memory import CPU_KV_BYTES, decide_kv_cache_bytes, measure_needs, read_device_memory
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.out_of_memory import explain_out_of_memory
from specwire.errors import InvalidArgumentError, UnavailableError

logger = logging.getLogger(__name__)

LESS_WORK = "lower max_num_seqs, max_num_batched_tokens or num_speculative_tokens; lower kv_cache_memory or gpu_memory_utilization if they were set"
"""What to do where rounds do not fit beside the KV cache."""


def make_kv_cache(config: VerifierConfig, model: Decoder, features: Sequence[FeatureSource] = ()) -> KVCache:
    """Blocks as configured; on a CUDA device, where nothing is configured, as many as fit beside everything else.

    Args:
        features: what heads read; their memory is the KV cache's, too.

    Raises:
        InvalidArgumentError: kv_cache_memory holds no block.
        ResourceExhaustedError: the device's memory does not suffice.
    """
    bytes_per_block = KVCache.bytes_per_block(model.config, model.dtype, features=features)
    num_blocks = config.num_kv_blocks or _kv_bytes(config, model, features, bytes_per_block) // bytes_per_block
    if num_blocks < 1:
        raise InvalidArgumentError(f"kv_cache_memory is {config.kv_cache_memory} bytes, but one KV block takes {bytes_per_block}; raise it")
    shares, pool = bool(features) and _shares_features(config), None
    try:
        if shares and model.device.type == "cpu":
            pool = make_pool(features, config.max_num_seqs, num_blocks, BLOCK_SIZE)
    except UnavailableError as error:
        shares = False
        logger.warning("features go to drafters over gRPC alone: %s", error)
    kv_cache = KVCache(model.config, num_blocks, model.dtype, model.device, features=features, feature_pool=pool)
    if shares and pool is None and kv_cache.features is not None:
        try:
            kv_cache.features.share(config.max_num_seqs)
        except UnavailableError as error:
            logger.warning("features go to drafters over gRPC alone: %s", error)
    return kv_cache


def make_round_runner(config: VerifierConfig, model: Decoder, kv_cache: KVCache, max_model_len: int) -> RoundRunner:
    """Not captured yet."""
    limits = RoundLimits(config.max_num_seqs, config.speculative_config.num_speculative_tokens, config.max_num_batched_tokens, max_model_len)
    return RoundRunner(model, kv_cache, limits, num_in_flight=config.max_outstanding_rounds, use_graphs=config.use_cuda_graphs)


def max_model_len(config: VerifierConfig, model: Decoder, kv_cache: KVCache) -> int:
    """As configured or the model's context, clipped to what the KV blocks and one message can hold.

    Raises:
        InvalidArgumentError: more than the model's context, or no room for a prompt token and an output token.
    """
    wanted = wanted_model_len(config, model.config)
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


def wanted_model_len(config: VerifierConfig, shape: ModelConfig) -> int:
    """As configured or the model's context. Raises InvalidArgumentError if it is more than that."""
    context = shape.max_position_embeddings
    wanted = config.max_model_len or context
    if wanted > context:
        raise InvalidArgumentError(f"max_model_len is {wanted}, but the model's context is {context}; lower it")
    return wanted


def _shares_features(config: VerifierConfig) -> bool:
    """Whether drafters of this host may read features in memory, and a line in the log where they may not."""
    if config.share_features == "never":
        reason = "share_features is never"
    elif config.share_features == "auto" and config.tls_cert:
        reason = "with TLS memory is shared only if share_features is always"
    else:
        return True
    logger.info("features go to drafters over gRPC alone: %s", reason)
    return False


def _kv_bytes(config: VerifierConfig, model: Decoder, features: Sequence[FeatureSource], bytes_per_block: int) -> int:
    if config.kv_cache_memory or model.device.type != "cuda":
        return config.kv_cache_memory or CPU_KV_BYTES
    longest = wanted_model_len(config, model.config)
    with explain_out_of_memory("run the largest round, even without a KV cache,", model.device, LESS_WORK):
        needs = measure_needs(model, lambda kv_cache: make_round_runner(config, model, kv_cache, longest), features)
    return decide_kv_cache_bytes(needs, read_device_memory(model.device), config.gpu_memory_utilization, bytes_per_block)
