"""Loads the draft head that the configuration names."""

import logging

from specwire.engine.heads.dflash import DFlashHead
from specwire.engine.heads.dspark import DSparkHead
from specwire.engine.heads.load import LoadedHead
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.decoder import NUMERICS_VERSION
from specwire.errors import InvalidArgumentError
from specwire.messages import FeatureSet, ServiceDescription

from .block import BlockForward
from .draft_head import DraftHead, Features
from .head_forward import HeadForward
from .sequential import SequentialForward

logger = logging.getLogger(__name__)


def head_drafter(
    loaded: LoadedHead,
    features: Features,
    *,
    num_blocks: int,
    max_num_drafts: int,
    max_num_seqs: int,
    greedy: bool = False,
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
    return DraftHead(_make_forward(loaded, kv_cache, max_num_drafts), features, source.width, description, greedy=greedy)


def _make_forward(loaded: LoadedHead, kv_cache: KVCache, max_num_drafts: int) -> HeadForward:
    if isinstance(loaded.head, DFlashHead | DSparkHead):
        most = loaded.head.num_queries - loaded.head.first_draft
        if max_num_drafts > most:
            raise InvalidArgumentError(
                f"num_speculative_tokens is {max_num_drafts}, but the head {loaded.config.name} drafts blocks of {most}; lower it to at most {most}"
            )
        return BlockForward(loaded.head, loaded.config.layers, kv_cache)
    return SequentialForward(loaded.head, loaded.config.layers, kv_cache)
