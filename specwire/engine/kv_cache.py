"""Paged keys and values of all layers, and features of draft heads beside them."""

from collections.abc import Sequence

import torch

from specwire.engine.features.pages import FeaturePages, Taps, feature_bytes
from specwire.engine.features.pool import FeaturePool
from specwire.engine.heads.source import FeatureSource
from specwire.engine.models.config import ModelConfig
from specwire.engine.out_of_memory import explain_out_of_memory, format_bytes

BLOCK_SIZE = 16


class KVCache:
    """One tensor per layer [num_blocks + 1, block_size, 2, num_kv_heads, head_dim]; index 0 of dimension 2 holds keys, 1 values.

    The last block (`scratch_block`) belongs to no sequence: rows that only pad a batch write there.

    Args:
        config: shape of the model.
        num_blocks: blocks that sequences may own.
        dtype: of keys and values.
        device: where they live.
        block_size: tokens per block.
        features: of the draft heads that read this model.
        feature_pool: memory for them; see `FeaturePages`.

    Attributes:
        features: None if there are none.

    Raises:
        InvalidArgumentError: a head is none for this model.
        ResourceExhaustedError: the device has no memory for that many blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int = BLOCK_SIZE,
        *,
        features: Sequence[FeatureSource] = (),
        feature_pool: FeaturePool | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch_block = num_blocks
        shape = (num_blocks + 1, block_size, 2, config.num_kv_heads, config.head_dim)
        num_bytes = self.bytes_per_block(config, dtype, block_size, features)
        doing = f"allocate {num_blocks} KV blocks of {num_bytes} bytes ({format_bytes(num_blocks * num_bytes)} in all)"
        with explain_out_of_memory(doing, device, "lower kv_cache_memory, num_kv_blocks or gpu_memory_utilization"):
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
            self.features = FeaturePages(features, config, num_blocks, block_size, dtype, device, feature_pool) if features else None
        self._no_taps = Taps(frozenset(), dtype)

    def key(self, layer: int) -> torch.Tensor:
        """Keys of a layer, a view [num_blocks + 1, block_size, num_kv_heads, head_dim]."""
        return self.layers[layer][:, :, 0]

    def value(self, layer: int) -> torch.Tensor:
        """Values of a layer, a view [num_blocks + 1, block_size, num_kv_heads, head_dim]."""
        return self.layers[layer][:, :, 1]

    @staticmethod
    def write(layer_kv: torch.Tensor, slot_mapping: torch.Tensor, key_value: torch.Tensor) -> None:
        """Stores key_value [T, 2 * num_kv_heads, head_dim] (keys first) at the slots [T] (block * block_size + offset) of one layer."""
        layer_kv.view(-1, *key_value.shape[1:]).index_copy_(0, slot_mapping, key_value)

    def taps(self) -> Taps:
        """Takes the hidden states of one pass that heads read."""
        return self._no_taps if self.features is None else self.features.taps()

    def write_features(self, taps: Taps, slot_mapping: torch.Tensor) -> None:
        """Stores what a pass over T tokens has left, at their slots [T]."""
        if self.features is not None:
            self.features.write(taps, slot_mapping)

    @staticmethod
    def bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_size: int = BLOCK_SIZE, features: Sequence[FeatureSource] = ()) -> int:
        """Memory of one block over all layers, and of the features of its tokens."""
        per_layer = 2 * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize
        return config.num_layers * per_layer + feature_bytes(features, block_size)
