"""A head's layers on the kernels of a device, whose passes graphs can hold: the counterpart of `specwire.engine.graphs.layers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specwire.engine.graphs.backends import Attention, Backend, PassInputs
from specwire.engine.kernels.linear import Linear
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.layer import LayerMath, LayerWeights


class HeadStates(NamedTuple):
    """Of T rows, in the head's dtype."""

    output: torch.Tensor  # [T, hidden_size], what the output layer reads
    carried: torch.Tensor  # [T, hidden_size], features of the rows that follow them


class DeviceTables:
    """cos and sin in the dtype that kernels read.

    Args:
        math: of the layers.
        config: their shape.
        dtype: of the weights.
    """

    def __init__(self, math: LayerMath, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.cos = math.cos[:, 0].to(dtype).contiguous()  # [num_positions, D]
        self.signed_sin = math.sin[:, 0].to(dtype).contiguous()  # [num_positions, D]


@dataclass(frozen=True, slots=True)
class DevicePass:
    """One pass over T rows. `attention` has seen the lengths."""

    tables: DeviceTables
    kv_cache: KVCache
    backend: Backend
    inputs: PassInputs
    attention: Attention | None  # None where no row asks anything

    def norm(self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds x to the residual, in place; the sum's norm."""
        return self.backend.layers.add_rms_norm(x, residual, weight, self.tables.config.rms_norm_eps)

    def attend(self, layer: LayerWeights, normed: torch.Tensor, index: int) -> torch.Tensor:
        """What attention of layer `index` adds to the residual stream; writes KV."""
        config, inputs, layer_kv = self.tables.config, self.inputs, self.kv_cache.layers[index]
        num_tokens, head_dim = len(normed), config.head_dim
        qkv = self.backend.linear(layer.qkv, normed).view(num_tokens, config.num_heads + 2 * config.num_kv_heads, head_dim)
        query = self.backend.layers.rotary_kv_write(
            qkv, self.tables.cos, self.tables.signed_sin, inputs.positions, inputs.slot_mapping, layer_kv, layer.q_norm, layer.k_norm,
            config.rms_norm_eps,
        )  # fmt: skip
        assert self.attention is not None, "a pass without attention"
        attended = self.attention(query, layer_kv, inputs)
        return self.backend.linear(layer.o, attended.view(num_tokens, config.num_heads * head_dim))

    def write_context(self, layer: LayerWeights, key_value: Linear, normed: torch.Tensor, index: int) -> None:
        """Writes KV of rows that ask nothing themselves, by the layer's product for keys and values alone, rows ordered k, v."""
        config, inputs = self.tables.config, self.inputs
        heads = self.backend.linear(key_value, normed).view(len(normed), 2 * config.num_kv_heads, config.head_dim)
        self.backend.layers.rotary_kv_write(
            heads, self.tables.cos, self.tables.signed_sin, inputs.positions, inputs.slot_mapping, self.kv_cache.layers[index],
            layer.q_norm, layer.k_norm, config.rms_norm_eps,
        )  # fmt: skip

    def feed_forward(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        """What the feed-forward part adds to the residual stream."""
        return self.backend.linear(layer.down, self.backend.layers.silu_mul(self.backend.linear(layer.gate_up, normed)))

    def layers(self, layers: Sequence[LayerWeights], x: torch.Tensor | None, residual: torch.Tensor, first: int) -> torch.Tensor:
        """Runs layers as a target has them, the first one with KV `first`; x and what is returned are still to be added to the residual."""
        for index, layer in enumerate(layers, first):
            x = self.attend(layer, self.norm(x, residual, layer.input_norm), index)
            x = self.feed_forward(layer, self.norm(x, residual, layer.post_norm))
        assert x is not None, "neither layers nor anything to add"
        return x
