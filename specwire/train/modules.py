"""Trainable parts that both heads are made of, named as the published checkpoints name them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from specwire.engine.models.config import ModelConfig
from specwire.train.batches import Batch
from specwire.train.target import rotate

START_SHARPNESS = 0.3
"""Of the final norm's weight at the start, relative to the target's: a head that knows nothing yet should not be sure. After forty small steps
the overlap of the first draft on answers not seen was 0.11 instead of 0.05 (EAGLE-3), 0.12 instead of 0.05 (DSpark)."""


class Drafted(NamedTuple):
    """K tokens, one after the other, behind each token of a batch: [b, i] holds drafts of tokens i + 1 to i + K."""

    tokens: torch.Tensor  # [B, L, K] int64
    signals: torch.Tensor  # [B, L, K, 3] float32: log-odds of the token's probability, log of the first's margin to the second, entropy


class Pairs(NamedTuple):
    """Drafts for R target positions, up to M for each: the input of `specwire.train.loss.vocabulary_loss`."""

    hidden: torch.Tensor  # [M, R, hidden_size]
    weights: torch.Tensor  # [M, R], 0 where there is no draft
    positions: torch.Tensor  # [M, R] int64, which draft of its block it is, from 0
    rows: torch.Tensor  # [R] int64, of the target positions in the flattened batch [B * L]
    previous: torch.Tensor | None  # [R, rank]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Widths of a head; those of the target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: ModelConfig) -> "HeadShape":
        """The target's."""
        return cls(config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)


class Norm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    """Projections of queries, keys and values with rotation; who attends to what is the head's business."""

    def __init__(self, shape: HeadShape, input_size: int, *, has_qk_norm: bool) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps) if has_qk_norm else nn.Identity()
        self.k_norm = Norm(shape.head_dim, shape.eps) if has_qk_norm else nn.Identity()

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, T, input_size], tables [B, T, D] -> [B, KV, G, T, D]: G query heads of each key head."""
        shape = self._shape
        heads = self.q_norm(self.q_proj(x).unflatten(-1, (shape.num_kv_heads, -1, shape.head_dim)))  # [B, T, KV, G, D]
        return _rotated(heads, cos[:, :, None, None], sin[:, :, None, None]).permute(0, 2, 3, 1, 4)

    def key(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, T, input_size] -> [B, KV, T, D]."""
        heads = self.k_norm(self.k_proj(x).unflatten(-1, (self._shape.num_kv_heads, self._shape.head_dim)))  # [B, T, KV, D]
        return _rotated(heads, cos[:, :, None], sin[:, :, None]).transpose(1, 2)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, input_size] -> [B, KV, T, D]."""
        return self.v_proj(x).unflatten(-1, (self._shape.num_kv_heads, self._shape.head_dim)).transpose(1, 2)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [B, KV, G, T, D] -> [B, T, hidden_size]."""
        return self.o_proj(attended.permute(0, 3, 1, 2, 4).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer's parts. The head calls them, since heads differ in what they attend to.

    Args:
        input_size: of the attention's input.
        has_hidden_norm: the first layer of an EAGLE-3 head, which reads an embedding and a hidden state side by side.
    """

    def __init__(self, shape: HeadShape, input_size: int, *, has_qk_norm: bool, has_hidden_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self._has_hidden_norm = has_hidden_norm
        if has_hidden_norm:
            self.hidden_norm = Norm(shape.hidden_size, shape.eps)
        self.self_attn = Attention(shape, input_size, has_qk_norm=has_qk_norm)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.mlp = FeedForward(shape)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, float32 [B, T, hidden_size], of what attention gave [B, KV, G, T, D]."""
        residual = residual.float() + self.self_attn.output(attended)
        return residual + self.mlp(self.post_attention_layernorm(residual))

    def start_from(self, tensors: dict[str, torch.Tensor], residual_rms: float) -> None:
        """Takes a target's layer over. What it adds to the residual stream is scaled for one that has an rms of 1.

        Args:
            tensors: by the name behind `model.layers.N.`, float32; of wider inputs only the last columns are taken.
            residual_rms: of the target's stream at that layer.
        """
        # A first layer of EAGLE-3 reads the stream behind hidden_norm; its input_layernorm is for embeddings.
        sources = {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": ""} if self._has_hidden_norm else {}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                source = tensors.get(sources.get(name, name))
                if source is None:
                    continue
                scale = 1 / residual_rms if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight") else 1.0
                if parameter.shape == source.shape:
                    parameter.copy_(source * scale)
                elif parameter.ndim == 2 and parameter.shape[0] == source.shape[0]:
                    parameter.normal_(0.0, 0.02)
                    parameter[:, -source.shape[1] :].copy_(source)


def draft_signals(log_probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """log_probs [R, V], columns that were drafted [R] -> float32 [R, 3], see `Drafted.signals`."""
    (first, second) = log_probs.topk(2, -1).values.unbind(-1)
    log_prob = log_probs.gather(-1, chosen[:, None])[:, 0]
    log_odds = log_prob - torch.log1p(-log_prob.exp().clamp_max(1 - 1e-6))
    entropy = -(log_probs.exp() * log_probs.clamp_min(-50.0)).sum(-1)
    return torch.stack((log_odds, first - second, entropy), -1)


def shifted(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """tokens [B, L] -> [B, L], the token `count` places later; 0 behind the end."""
    return F.pad(tokens[:, count:], (0, min(count, tokens.shape[1])))


def residual_rms(batch: Batch, num_layers: int) -> torch.Tensor:
    """Median over tokens of the root mean square of each feature layer [num_layers], float32. A mean would be that of the few huge tokens."""
    parts = batch.features.unflatten(-1, (num_layers, -1))
    is_token = torch.arange(parts.shape[1], device=parts.device) < batch.lengths[:, None]
    return parts[is_token].float().square().mean(-1).sqrt().median(0).values


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate(heads.float(), cos, sin).to(heads.dtype)
