"""Loads the draft model that the configuration names."""

import logging
import time

from specwire.config import DrafterConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.progress import log_progress
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import check_device, open_model
from specwire.engine.runner import set_num_threads
from specwire.errors import InvalidArgumentError
from specwire.tokenizer import Tokenizer

from .draft_model import DraftModel
from .forward import DraftForward, make_forward

logger = logging.getLogger(__name__)


def load_draft_model(config: DrafterConfig) -> DraftModel:
    """Loads weights and allocates KV blocks, on the thread that will run the model.

    Raises:
        SpecwireError: the model is missing or not supported, or kv_cache_memory holds no sequence.
    """
    spec = config.speculative_config
    assert spec.model is not None, "a configuration with method draft_model names its model"
    set_num_threads(config.num_threads)
    check_device(config.device)
    started = time.monotonic()
    folder = resolve_model(spec.model)
    model = open_model(folder, load_format=config.load_format, dtype=config.dtype, device=config.device)
    context = model.config.max_position_embeddings
    max_model_len = min(spec.max_model_len or context, context)
    num_blocks = _num_blocks(config, KVCache.bytes_per_block(model.config, model.dtype), max_model_len)
    fingerprint = ""
    if (folder / "tokenizer.json").is_file():
        fingerprint = Tokenizer.from_folder(folder).fingerprint
    else:
        logger.warning("%s has no tokenizer.json: whether its ids are the target's is not checked", folder)
    logger.info(
        "%s (%s) with %d KV blocks of %d tokens, loaded in %.1f s", spec.model, str(model.dtype).removeprefix("torch."), num_blocks, BLOCK_SIZE,
        time.monotonic() - started,
    )  # fmt: skip
    return DraftModel(
        model,
        _make_forward(config, model, KVCache(model.config, num_blocks, model.dtype, model.device), max_model_len),
        num_blocks=num_blocks,
        max_num_drafts=spec.num_speculative_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        greedy=spec.draft_sample_method == "greedy",
        model_id=spec.model,
        tokenizer_fingerprint=fingerprint,
    )


def _make_forward(config: DrafterConfig, model: Decoder, kv_cache: KVCache, max_model_len: int) -> DraftForward:
    """What runs the draft model; on CUDA with its graphs captured."""
    forward = make_forward(
        model,
        kv_cache,
        max_num_seqs=config.max_num_seqs,
        max_num_drafts=config.speculative_config.num_speculative_tokens,
        max_model_len=max_model_len,
        max_chunk=config.prefill_chunk,
        use_graphs=config.use_cuda_graphs,
    )
    if isinstance(forward, DraftRunner):
        started = time.monotonic()
        forward.capture(log_progress(logger, "capturing graphs"))
        logger.info("captured %d graphs in %.1f s", forward.num_graphs, time.monotonic() - started)
    return forward


def _num_blocks(config: DrafterConfig, bytes_per_block: int, max_model_len: int) -> int:
    """As many blocks as the memory holds, but not more than all sequences at full length need."""
    blocks_per_sequence = -(-max_model_len // BLOCK_SIZE)
    num_blocks = min(config.kv_cache_memory // bytes_per_block, config.max_num_seqs * blocks_per_sequence)
    if num_blocks < min(blocks_per_sequence, 2):
        raise InvalidArgumentError(
            f"kv_cache_memory is {config.kv_cache_memory} bytes, which is {num_blocks} KV blocks of {bytes_per_block} bytes; "
            f"give at least {2 * bytes_per_block} ({blocks_per_sequence * bytes_per_block} hold one sequence of {max_model_len} tokens)"
        )
    if num_blocks < blocks_per_sequence:
        logger.warning("%d KV blocks hold no sequence of %d tokens: long sequences get no drafts", num_blocks, max_model_len)
    return num_blocks
