"""What all layers of one shape compute: norms, rotation, attention over paged KV, feed-forward. Knows no embedding and no head."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.kernels.linear import Linear
from specwire.engine.kernels.ragged_attention import ragged_attention
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H heads, KV key/value heads, D head_dim."""

    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # hidden_size -> (H + 2 KV) * D, rows ordered q, k, v
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: Linear  # H * D -> hidden_size
    post_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size -> 2 * intermediate_size, rows ordered gate, up
    down: Linear  # intermediate_size -> hidden_size


class Rotation(NamedTuple):
    """Of T tokens, float32."""

    cos: torch.Tensor  # [T, 1, D]
    signed_sin: torch.Tensor  # [T, 1, D], first half negated


class RmsNorm:
    """Root-mean-square norm of float32 rows [T, n], into a dtype.

    `F.rms_norm` takes six operators on a CPU, this four: x / sqrt(mean(x^2) + eps) = x * sqrt(n) / hypot(|x|, sqrt(n * eps)).

    Args:
        weight: [n].
        eps: added to the mean square.
        dtype: of the result.
    """

    __slots__ = ("_dtype", "_factor", "_floor")

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self._factor = weight.float() * len(weight) ** 0.5
        self._floor = torch.tensor((len(weight) * eps) ** 0.5, device=weight.device)
        self._dtype = dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        length = torch.hypot(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), self._floor)
        return (rows * self._factor).div_(length).to(self._dtype)


class LayerMath:
    """The parts of a layer for one shape; inputs are normalised already, and nothing is added to the residual stream here.

    Args:
        config: shape of the layers.
        dtype, device: of the weights.
        num_positions: tokens that positions may reach; None = max_position_embeddings.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, num_positions: int | None = None) -> None:
        self._config = config
        self._scale = config.head_dim**-0.5
        cos, sin = rope_table(config.rope, config.head_dim, num_positions or config.max_position_embeddings)
        # Long contexts make these tables large: on a GPU they are kept in the only dtype that its kernels read.
        table_dtype = torch.float32 if device.type == "cpu" else dtype
        self.cos = cos.to(device, table_dtype)[:, None]  # [num_positions, 1, D]
        self.sin = sin.to(device, table_dtype)[:, None]  # [num_positions, 1, D], first half negated

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Of tokens at positions [T] int64."""
        return Rotation(self.cos.index_select(0, positions).float(), self.sin.index_select(0, positions).float())

    def attend(self, layer: LayerWeights, normed: torch.Tensor, rotation: Rotation, batch: RaggedBatch, layer_kv: torch.Tensor) -> torch.Tensor:
        """Writes KV of the batch's tokens; returns what attention adds to the residual stream [T, hidden_size].

        Args:
            normed: [T, in_features of layer.qkv].
            layer_kv: the layer's cache.
        """
        num_heads, num_kv_heads, head_dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        num_tokens = len(normed)
        qkv = layer.qkv(normed).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        self._rotate(layer, qkv, num_heads, rotation)
        KVCache.write(layer_kv, batch.slot_mapping, qkv[:, num_heads:])
        attended = ragged_attention(
            qkv[:, :num_heads], layer_kv, batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, self._scale, plan=batch.attention_plan
        )  # [T, H, D]
        return layer.o(attended.view(num_tokens, num_heads * head_dim))

    def feed_forward(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        """What the feed-forward part adds to the residual stream [T, hidden_size]."""
        gate, up = layer.gate_up(normed).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up))

    def write_context(
        self, layer: LayerWeights, key_value: Linear, normed: torch.Tensor, rotation: Rotation, slot_mapping: torch.Tensor, layer_kv: torch.Tensor
    ) -> None:
        """Writes KV of T tokens that ask nothing themselves.

        Args:
            key_value: the layer's product for keys and values alone, rows ordered k, v.
            normed: [T, in_features of key_value].
            slot_mapping: [T] int64, where they go.
        """
        heads = key_value(normed).view(len(normed), 2 * self._config.num_kv_heads, self._config.head_dim)
        self._rotate(layer, heads, 0, rotation)
        KVCache.write(layer_kv, slot_mapping, heads)

    def _rotate(self, layer: LayerWeights, heads: torch.Tensor, num_queries: int, rotation: Rotation) -> None:
        """Normalises, where the model does, and rotates queries and keys of heads [T, num_queries + 2 KV, D] in place."""
        head_dim, eps = self._config.head_dim, self._config.rms_norm_eps
        num_rotated = num_queries + self._config.num_kv_heads
        rotated = heads[:, :num_rotated].float()
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = rotated[:, :num_queries], rotated[:, num_queries:]
            rotated = torch.cat(
                (F.rms_norm(query, (head_dim,), layer.q_norm.float(), eps), F.rms_norm(key, (head_dim,), layer.k_norm.float(), eps)), 1
            )
        heads[:, :num_rotated] = (rotated * rotation.cos).addcmul_(rotated.roll(head_dim // 2, -1), rotation.signed_sin)
