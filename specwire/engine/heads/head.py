"""What drafting methods see of a head that drafts token by token, and the layers that all heads have."""

from collections.abc import Sequence
from typing import Protocol

import torch

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.device import DevicePass, DeviceTables, HeadStates
from specwire.engine.heads.vocabulary import Vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.layer import LayerMath, LayerWeights, RmsNorm, Rotation


class SequentialHead(Protocol):
    """A head that drafts token by token. Row i of a sequence is feature f_i beside token x_(i+1), at position i; it predicts x_(i+2).

    Behind the features of the target it goes on with its own: what `carry` makes of a row stands for the feature of the next.
    """

    vocabulary: Vocabulary
    tables: DeviceTables

    def run(self, features: torch.Tensor, on: DevicePass) -> HeadStates:
        """As `forward`, `output` and `carry` of all rows, on the kernels of a device. features: [T, width] in the head's dtype, unchanged."""
        ...

    def forward(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        """Writes KV of rows whose tokens are the batch's, with features [T, width]; returns the residual stream behind the last layer,
        float32 [T, hidden_size]."""
        ...

    def output(self, residual: torch.Tensor) -> torch.Tensor:
        """Rows [R, hidden_size] of the residual stream as the vocabulary's head reads them."""
        ...

    def carry(self, residual: torch.Tensor) -> torch.Tensor:
        """Rows [R, hidden_size] of the residual stream as features of the rows that follow them."""
        ...


class Layers:
    """Decoder layers as a target has them.

    Args:
        math: of their shape.
        layers: at least one.
        config: their shape.
        dtype: of the weights.
        first: index of the first one's KV.
    """

    def __init__(self, math: LayerMath, layers: Sequence[LayerWeights], config: ModelConfig, dtype: torch.dtype, first: int = 0) -> None:
        self._math = math
        self._first = first
        eps = config.rms_norm_eps
        self._layers = [(layer, RmsNorm(layer.input_norm, eps, dtype), RmsNorm(layer.post_norm, eps, dtype)) for layer in layers]

    def run(self, residual: torch.Tensor, rotation: Rotation, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        """Adds to the residual stream, float32 [T, hidden_size], in place, and returns it."""
        for (layer, input_norm, post_norm), layer_kv in zip(self._layers, kv_cache.layers[self._first :], strict=True):
            residual += self._math.attend(layer, input_norm(residual), rotation, batch, layer_kv)
            residual += self._math.feed_forward(layer, post_norm(residual))
        return residual
