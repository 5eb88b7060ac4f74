"""Runs one model over ragged batches.

Nothing that knows of requests, sampling, scheduling or time may be added here: a segment is tokens, a position and a block table.
Nothing may be added between a forward pass and its caller that waits for the device.
"""

import os
from collections.abc import Sequence

import torch

from specwire.engine.batch import RaggedBatch, Segment
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder


def set_num_threads(num_threads: int) -> None:
    """Sets the number of threads that one operator of this process uses, 0 = one for each core that it may run on; call it once, before the
    first forward pass."""
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))


class ModelRunner:
    """A decoder and the paged KV that it reads and writes. Not thread-safe: one thread owns it.

    Args:
        model: the decoder.
        kv_cache: on the same device, of the same dtype.
    """

    def __init__(self, model: Decoder, kv_cache: KVCache) -> None:
        self.model = model
        self.kv_cache = kv_cache

    def batch(self, segments: Sequence[Segment]) -> RaggedBatch:
        """Flattens segments of different sequences."""
        model = self.model
        group = model.config.num_heads // model.config.num_kv_heads
        return RaggedBatch.from_segments(segments, self.kv_cache.block_size, group, model.device, model.dtype, plans_attention=not model.is_tiled)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Computes all tokens of the batch and writes their KV. Returns hidden states [T, hidden_size] in the model's dtype
        (float32 in 4 bits)."""
        return self.model.forward(batch, self.kv_cache)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, row_indices: Sequence[int]) -> torch.Tensor:
        """Float32 logits [R, vocab_size] of the chosen token rows [R] of `hidden`."""
        rows = torch.tensor(row_indices, dtype=torch.int64, device=hidden.device)
        return self.model.logits(hidden.index_select(0, rows))
