"""One lean decoder for the Llama family: fused projections, paged KV, pure inference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.features.pages import Taps
from specwire.engine.heads.source import FINAL_LAYER
from specwire.engine.kernels.linear import LogitsHead
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.layer import LayerMath, LayerWeights, RmsNorm

if TYPE_CHECKING:
    from specwire.engine.cpu.forward import TiledForward

NUMERICS_VERSION = 6
"""Raised whenever a change of the decoder may change a logit: lanes of one coordinator must agree on it."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What a forward pass of another kind than `Decoder.forward` needs."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden_size]
    head: LogitsHead
    cos: torch.Tensor  # [max_position_embeddings, D], as `rope_table` gives it, in the model's dtype
    signed_sin: torch.Tensor  # [max_position_embeddings, D]


class Decoder:
    """Weights and forward pass of one model; holds no state of any sequence.

    The residual stream, the norms and the rotation are float32 whatever the model's dtype: that halves the distance of a bfloat16 model's
    logits from float32's.

    Args:
        config: shape of the model.
        embedding: [vocab_size, hidden_size].
        layers: one `LayerWeights` per layer.
        final_norm: [hidden_size].
        head: hidden_size -> vocab_size with float32 output.
        weights_hash: identifies the weights (hex sha256).
        weights_format: how the linear layers' weights are kept, a name of `specwire.engine.models.weights`; empty = as the dtype says.
        is_tiled: linear layers and head are those of `specwire.engine.cpu`, which computes the passes, too.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: list[LayerWeights],
        final_norm: torch.Tensor,
        head: LogitsHead,
        weights_hash: str,
        *,
        weights_format: str = "",
        is_tiled: bool = False,
    ) -> None:
        self.config = config
        self.weights_hash = weights_hash
        self.weights_format = weights_format
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._math = LayerMath(config, self.dtype, self.device)
        self._norms = [
            (RmsNorm(layer.input_norm, config.rms_norm_eps, self.dtype), RmsNorm(layer.post_norm, config.rms_norm_eps, self.dtype))
            for layer in layers
        ]
        self._last_norm = RmsNorm(final_norm, config.rms_norm_eps, self.dtype)
        self._tiled = self._make_tiled() if is_tiled else None

    def _make_tiled(self) -> "TiledForward":
        from specwire.engine.cpu.forward import TiledForward  # brings a compiler

        return TiledForward(self.config, self._layers, self._final_norm.float(), self._head, self._math.cos, self._math.sin)

    @property
    def is_tiled(self) -> bool:
        """Whether passes are computed by `TiledForward`: attention then needs no plan, and hidden states are float32."""
        return self._tiled is not None

    @property
    def weights(self) -> DecoderWeights:
        """The tensors themselves, not copies (but on a CPU cos and sin, if the model is not float32)."""
        return DecoderWeights(
            self._embedding, self._layers, self._final_norm, self._head, self._math.cos[:, 0].to(self.dtype), self._math.sin[:, 0].to(self.dtype)
        )

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        """Computes the batch's tokens and writes their KV and features. Returns hidden states after the final norm [T, hidden_size]."""
        taps = kv_cache.taps()
        if self._tiled is not None:
            hidden = self._tiled.forward(batch, F.embedding(batch.token_ids, self._embedding).float(), kv_cache.layers, taps)
        else:
            hidden = self._forward(batch, kv_cache, taps)
        taps.take(FINAL_LAYER, hidden)
        kv_cache.write_features(taps, batch.slot_mapping)
        return hidden

    def _forward(self, batch: RaggedBatch, kv_cache: KVCache, taps: Taps) -> torch.Tensor:
        math = self._math
        rotation = math.rotation(batch.positions)
        residual = F.embedding(batch.token_ids, self._embedding).float()  # [T, hidden_size]
        for index, (layer, (input_norm, post_norm), layer_kv) in enumerate(zip(self._layers, self._norms, kv_cache.layers, strict=True)):
            taps.take(index, residual)
            residual += math.attend(layer, input_norm(residual), rotation, batch, layer_kv)
            residual += math.feed_forward(layer, post_norm(residual))
        taps.take(len(self._layers), residual)
        return self._last_norm(residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 logits [R, vocab_size]."""
        return self._head(hidden) if self._tiled is None else self._tiled.logits(hidden)
