"""The target model over padded batches: features of known tokens, and what a cached decoding step needs. No paged KV, no kernels of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import load_model, tensor_shapes
from specwire.train.tensors import read_tensors

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [B, H, L, D], key [B, KV, L, D], value [B, KV, L, D]) -> attended [B, H, L, D]."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Of B padded sequences of L tokens, in the target's dtype."""

    features: torch.Tensor  # [B, L, F * hidden_size], residual stream entering each feature layer
    final: torch.Tensor  # [B, L, hidden_size], after the final norm


class Target:
    """A frozen model with dense weights. Residual stream, norms and rotation are float32, as in the engine's decoder.

    Args:
        folder: as `specwire.engine.checkpoint.resolve_model` gives it.
        dtype: of the weights.
        device: where they live.

    Raises:
        SpecwireError: as `load_model`.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        decoder = load_model(folder, dtype, device)
        self.folder, self.config, self.device, self.dtype = folder, decoder.config, device, dtype
        self.weights_hash = decoder.weights_hash
        weights = decoder.weights
        self.embedding = weights.embedding
        self._layers, self._logits = weights.layers, weights.head
        self._final_norm = weights.final_norm.float()
        self.cos, self.signed_sin = weights.cos.float(), weights.signed_sin.float()
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        self.head = self.embedding if self.config.tie_word_embeddings else read_tensors(folder, [name])[name].to(device, dtype)

    def last_layers(self, count: int) -> list[dict[str, torch.Tensor]]:
        """float32 tensors of the last layers on the CPU, by the name behind `model.layers.N.`; layers repeat if there are fewer."""
        config: ModelConfig = self.config
        first = max(0, config.num_layers - count)
        layers = []
        for index in [max(first, config.num_layers - count + i) for i in range(count)]:
            prefix = f"model.layers.{index}."
            read = read_tensors(self.folder, [name for name in tensor_shapes(config) if name.startswith(prefix)])
            layers.append({name.removeprefix(prefix): tensor.float() for name, tensor in read.items()})
        return layers

    def final_norm(self) -> torch.Tensor:
        """Weight of the final norm, float32 [hidden_size]."""
        return self._final_norm

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 [R, vocab_size]."""
        return self._logits(hidden)

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, feature_layers: Sequence[int]) -> Hidden:
        """Causal pass over tokens [B, L], padded at the right."""
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)

        def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return causal_attention(query, key, value)

        return self.forward(tokens, positions, attend, feature_layers)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, feature_layers: Sequence[int] = ()) -> Hidden:
        """tokens and positions [B, L]; `attend` keeps the KV where there is one."""
        config, (rows, length) = self.config, tokens.shape
        num_heads, num_kv_heads, head_dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        cos, sin = self.cos[positions].unsqueeze(1), self.signed_sin[positions].unsqueeze(1)  # [B, 1, L, D]
        residual = F.embedding(tokens, self.embedding).float()  # [B, L, hidden_size]
        features = {}
        for index, layer in enumerate(self._layers):
            if index in feature_layers:
                features[index] = residual.to(self.dtype)
            qkv = layer.qkv(self._norm(residual, layer.input_norm).flatten(0, 1)).view(rows, length, -1, head_dim).transpose(1, 2)
            query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)  # [B, heads, L, D]
            query, key = query.float(), key.float()
            if layer.q_norm is not None and layer.k_norm is not None:
                query = F.rms_norm(query, (head_dim,), layer.q_norm.float(), eps)
                key = F.rms_norm(key, (head_dim,), layer.k_norm.float(), eps)
            query, key = (rotate(x, cos, sin).to(self.dtype) for x in (query, key))
            attended = attend(index, query, key, value).transpose(1, 2).reshape(rows * length, num_heads * head_dim)
            residual = residual + layer.o(attended).view_as(residual)
            gate, up = layer.gate_up(self._norm(residual, layer.post_norm).flatten(0, 1)).chunk(2, -1)
            residual = residual + layer.down(F.silu(gate).mul_(up)).view_as(residual)
        if config.num_layers in feature_layers:
            features[config.num_layers] = residual.to(self.dtype)
        final = self._norm(residual, self._final_norm)
        return Hidden(torch.cat([features[index] for index in feature_layers], -1) if feature_layers else final[..., :0], final)

    def _norm(self, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual, (residual.shape[-1],), weight.float(), self.config.rms_norm_eps).to(self.dtype)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """query [B, H, L, D], key and value [B, KV, L, D] -> [B, H, L, D].

    Args:
        visible: [B, 1, L, L] bool, who attends to whom, instead of all that came before.
    """
    # Not cuDNN's: it makes a plan for each shape, which took a minute of a fresh GPU's first run.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        if visible is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        # With a mask only the plain kernel groups heads by itself; it would write all scores to memory.
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that nothing holds, nor torch keeps for later."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., D] by tables that broadcast to it (`specwire.engine.models.rope.rope_table`)."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin
