"""One lean decoder for the Llama family: fused projections, paged KV, pure inference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.kernels.linear import Linear, LogitsHead
from specwire.engine.kernels.ragged_attention import ragged_attention
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.rope import rope_table

if TYPE_CHECKING:
    from specwire.engine.cpu.forward import TiledForward

NUMERICS_VERSION = 3
"""Raised whenever a change of the decoder may change a logit: lanes of one coordinator must agree on it."""


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
        is_tiled: bool = False,
    ) -> None:
        self.config = config
        self.weights_hash = weights_hash
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._scale = config.head_dim**-0.5
        self._norms = [(_norm_factor(layer.input_norm), _norm_factor(layer.post_norm)) for layer in layers]
        self._final_factor = _norm_factor(final_norm)
        self._norm_floor = torch.tensor((config.hidden_size * config.rms_norm_eps) ** 0.5, device=self.device)
        cos, sin = rope_table(config.rope, config.head_dim, config.max_position_embeddings)
        # Long contexts make these tables large: on a GPU they are kept in the only dtype that its kernels read.
        table_dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        self._cos = cos.to(self.device, table_dtype)[:, None]  # [max_position_embeddings, 1, D]
        self._sin = sin.to(self.device, table_dtype)[:, None]  # [max_position_embeddings, 1, D], first half negated
        self._tiled = self._make_tiled() if is_tiled else None

    def _make_tiled(self) -> "TiledForward":
        from specwire.engine.cpu.forward import TiledForward  # brings a compiler

        return TiledForward(self.config, self._layers, self._final_norm.float(), self._head, self._cos, self._sin)

    @property
    def is_tiled(self) -> bool:
        """Whether passes are computed by `TiledForward`: attention then needs no plan, and hidden states are float32."""
        return self._tiled is not None

    @property
    def weights(self) -> DecoderWeights:
        """The tensors themselves, not copies (but on a CPU cos and sin, if the model is not float32)."""
        return DecoderWeights(
            self._embedding, self._layers, self._final_norm, self._head, self._cos[:, 0].to(self.dtype), self._sin[:, 0].to(self.dtype)
        )

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        """Computes the batch's tokens and writes their KV. Returns hidden states after the final norm [T, hidden_size]."""
        if self._tiled is not None:
            return self._tiled.forward(batch, F.embedding(batch.token_ids, self._embedding).float(), kv_cache.layers)
        config = self.config
        num_heads, num_kv_heads, head_dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        num_rotated = num_heads + num_kv_heads
        num_tokens = batch.num_tokens
        cos = self._cos.index_select(0, batch.positions).float()  # [T, 1, D]
        sin = self._sin.index_select(0, batch.positions).float()

        residual = F.embedding(batch.token_ids, self._embedding).float()  # [T, hidden_size]
        for layer, (input_factor, post_factor), layer_kv in zip(self._layers, self._norms, kv_cache.layers, strict=True):
            qkv = layer.qkv(self._normalise(residual, input_factor)).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
            query_key = qkv[:, :num_rotated].float()
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = query_key[:, :num_heads], query_key[:, num_heads:]
                query_key = torch.cat(
                    (F.rms_norm(query, (head_dim,), layer.q_norm.float(), eps), F.rms_norm(key, (head_dim,), layer.k_norm.float(), eps)), 1
                )
            qkv[:, :num_rotated] = (query_key * cos).addcmul_(query_key.roll(head_dim // 2, -1), sin)
            kv_cache.write(layer_kv, batch.slot_mapping, qkv[:, num_heads:])
            attended = ragged_attention(
                qkv[:, :num_heads], layer_kv, batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, self._scale, plan=batch.attention_plan
            )  # [T, H, D]
            residual += layer.o(attended.view(num_tokens, num_heads * head_dim))
            gate, up = layer.gate_up(self._normalise(residual, post_factor)).chunk(2, -1)
            residual += layer.down(F.silu(gate).mul_(up))
        return self._normalise(residual, self._final_factor)

    def _normalise(self, residual: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of residual, float32 [T, hidden_size], in the model's dtype.

        `F.rms_norm` takes six operators on a CPU, this four: x / sqrt(mean(x^2) + eps) = x * sqrt(n) / hypot(|x|, sqrt(n * eps)).
        """
        length = torch.hypot(torch.linalg.vector_norm(residual, dim=-1, keepdim=True), self._norm_floor)
        return (residual * factor).div_(length).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 logits [R, vocab_size]."""
        return self._head(hidden) if self._tiled is None else self._tiled.logits(hidden)


def _norm_factor(weight: torch.Tensor) -> torch.Tensor:
    """A norm's weight, float32, times the square root of its length."""
    return weight.float() * len(weight) ** 0.5
