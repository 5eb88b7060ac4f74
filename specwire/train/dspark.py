"""A trainable DSpark head (https://arxiv.org/abs/2607.05147): a block of drafts in one pass, re-ranked by a bias of the token before.

With tokens x_0..x_c known, the block is [x_c, mask, mask, ...] at positions c, c + 1, ...; slot s predicts token c + s + 1. All layers attend to
keys and values made of the target's features of tokens 0..c - 1, and to the whole block.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from specwire.engine.heads.markov import highest
from specwire.train.batches import Batch
from specwire.train.loss import product
from specwire.train.modules import START_SHARPNESS, Attention, Drafted, HeadShape, Layer, Norm, Pairs, draft_signals, residual_rms
from specwire.train.noise import Noise
from specwire.train.recipe import Recipe
from specwire.train.target import Target

_OUTWEIGHS = 8
"""What the layers add at the start is so much larger than in EAGLE-3: a stream that began as the mask's embedding would predict the mask."""


class MarkovHead(nn.Module):
    """Low-rank bias: logits += markov_w2 markov_w1[previous token]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)


class DSparkHead(nn.Module):
    """The weights that a checkpoint holds; embedding and output layer are the target's and frozen.

    Args:
        recipe: num_layers, num_draft_tokens, markov_rank, rerank, anchor_stride, position_decay.
        target: whose shape and tables it has.
        num_features: feature layers.
        draft_ids: [draft_vocab_size] ids that can be drafted; None = all.
        mask_token_id: whose embedding stands for a token to be drafted.
    """

    feature_scale: torch.Tensor

    def __init__(self, recipe: Recipe, target: Target, num_features: int, draft_ids: torch.Tensor | None, mask_token_id: int) -> None:
        super().__init__()
        shape = HeadShape.of(target.config)
        self._recipe, self._target, self._num_features = recipe, target, num_features
        self._draft_ids, self._mask_token_id = draft_ids, mask_token_id
        self.fc = nn.Linear(num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.register_buffer("feature_scale", torch.ones(num_features))
        self.hidden_norm = Norm(shape.hidden_size, shape.eps)
        # The format's layers are Qwen 3's, which normalise queries and keys.
        self._decoder = [Layer(shape, shape.hidden_size, has_qk_norm=True, has_hidden_norm=False) for _ in range(recipe.num_layers)]
        self.layers = nn.ModuleList(self._decoder)
        self.norm = Norm(shape.hidden_size, shape.eps)
        vocab_size = target.config.vocab_size
        self.markov_head = MarkovHead(vocab_size, vocab_size if draft_ids is None else len(draft_ids), recipe.markov_rank)

    @property
    def bias_head(self) -> torch.Tensor:
        """[draft_vocab_size, rank]."""
        return self.markov_head.markov_w2.weight

    def start(self, batch: Batch) -> None:
        """Starts from the target: its last layers, queries and keys scaled to what they have there, over the last feature layer."""
        rms = residual_rms(batch, self._num_features)
        with torch.no_grad():
            self.feature_scale.copy_(1 / rms)
            self.fc.weight.normal_(0.0, 0.002)
            self.fc.weight[:, -self.fc.out_features :] += torch.eye(self.fc.out_features, device=self.fc.weight.device)
            self.norm.weight.copy_(self._target.final_norm() * START_SHARPNESS)
            all_tensors = self._target.last_layers(len(self._decoder))
            self.hidden_norm.weight.copy_(all_tensors[-1]["input_layernorm.weight"])
            for layer, tensors in zip(self._decoder, all_tensors, strict=True):
                layer.start_from(tensors, rms[-1].item() / _OUTWEIGHS)
                if not self._target.config.qk_norm:
                    _start_qk_norm(layer.self_attn, tensors["input_layernorm.weight"])

    def pairs(self, batch: Batch, generator: torch.Generator | None = None) -> Pairs:
        """Drafts of blocks at every anchor_stride-th token of the answers, from a random one on."""
        recipe, (num_rows, length) = self._recipe, batch.tokens.shape
        stride, size, device = recipe.anchor_stride, recipe.num_draft_tokens, batch.tokens.device
        offset = torch.randint(stride, (num_rows,), device=device, generator=generator)
        first = batch.prompt_lens + offset  # [B]
        num_blocks = max(1, -(-batch.longest_answer // stride))
        anchors = first[:, None] + stride * torch.arange(num_blocks, device=device)  # [B, A]
        hidden = self.blocks(batch, anchors.clamp_max(length - 1))  # [B, A, S, hidden_size]

        # Target position t is slot (t - first) % stride + m * stride of block (t - first) // stride - m.
        since = torch.arange(length, device=device) - first[:, None]  # [B, L]
        chosen, positions, drafts = [], [], []
        for back in range(-(-size // stride)):
            block = since.div(stride, rounding_mode="floor") - back
            slot = since % stride + back * stride
            drafts.append((block >= 0) & (block < num_blocks) & (slot < size))
            positions.append(slot)
            flat = (torch.arange(num_rows, device=device)[:, None] * num_blocks + block.clamp(0, num_blocks - 1)) * size + slot.clamp_max(size - 1)
            chosen.append(flat)
        is_draft = torch.stack(drafts) & (torch.arange(length, device=device) + 1 < batch.lengths[:, None])
        is_draft = is_draft.flatten(1)  # [M, B * L]
        rows = is_draft.any(0).nonzero()[:, 0]
        slots = torch.stack(positions).flatten(1)[:, rows]
        weights = is_draft[:, rows] * recipe.position_decay**slots
        stacked = hidden.flatten(0, 2)[torch.stack(chosen).flatten(1)[:, rows]]
        previous = self.markov_head.markov_w1(batch.tokens.flatten()[rows])
        return Pairs(stacked, weights.float(), slots.clamp_max(size - 1), rows, previous)

    @torch.no_grad()
    def drafts(self, batch: Batch, noise: Noise | None = None) -> Drafted:
        """What it drafts behind each token of the answers; elsewhere zeros."""
        size, device = self._recipe.num_draft_tokens, batch.tokens.device
        tokens = torch.zeros((*batch.tokens.shape, size), dtype=torch.int64, device=device)
        signals = torch.zeros((*tokens.shape, 3), device=device)
        num_blocks = batch.longest_answer
        anchors = (batch.prompt_lens[:, None] + torch.arange(num_blocks, device=device)).clamp_max(batch.tokens.shape[1] - 1)
        hidden = self.blocks(batch, anchors).flatten(0, 1)  # [B * A, S, hidden_size]
        previous = batch.tokens.gather(1, anchors).flatten()
        step = 64 if device.type != "cuda" else max(1, 2**27 // (size * self._target.config.vocab_size))
        places = anchors.flatten()  # of block n, which is of sequence n // A
        pieces = [
            self._rerank(hidden[block], previous[block], block // anchors.shape[1], places[block], noise)
            for block in torch.arange(len(places), device=device).split(step)
        ]
        drafted = [torch.cat(parts).unflatten(0, anchors.shape) for parts in zip(*pieces, strict=True)]
        rows = torch.arange(len(anchors), device=device)[:, None]
        tokens[rows, anchors], signals[rows, anchors] = drafted
        return Drafted(tokens, signals)

    def _rerank(
        self, hidden: torch.Tensor, previous: torch.Tensor, rows: torch.Tensor, anchors: torch.Tensor, noise: Noise | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, S, hidden_size], previous [N], rows [N] of the batch and anchors [N] in them -> tokens [N, S] and signals [N, S, 3]."""
        head = self._target.head if self._draft_ids is None else self._target.head[self._draft_ids]
        base = product(hidden.flatten(0, 1), head)
        columns, best = highest(base, min(self._recipe.rerank, base.shape[-1]))
        assert columns is not None, "candidates are some of all ids"
        candidates, values = columns.unflatten(0, hidden.shape[:2]), best.unflatten(0, hidden.shape[:2])  # [N, S, C]
        tokens, signals = [], []
        for slot in range(hidden.shape[1]):
            bias = (self.bias_head[candidates[:, slot]] @ self.markov_head.markov_w1(previous)[:, :, None])[:, :, 0]
            logits = values[:, slot] + bias.float()
            ids = candidates[:, slot] if self._draft_ids is None else self._draft_ids[candidates[:, slot]]
            if noise is None:
                log_probs = logits.log_softmax(-1)
                chosen = log_probs.argmax(-1)
            else:
                chosen = noise.choose(logits, rows, anchors + 1 + slot, ids)
                log_probs = noise.log_probs(logits, rows)
            previous = ids.gather(1, chosen[:, None])[:, 0]
            tokens.append(previous)
            signals.append(draft_signals(log_probs, chosen))
        return torch.stack(tokens, 1), torch.stack(signals, 1)

    def blocks(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """What the output layer reads of the blocks at anchors [B, A], as [B, A, S, hidden_size]."""
        target, size = self._target, self._recipe.num_draft_tokens
        parts = batch.features.unflatten(-1, (self._num_features, -1)).float() * self.feature_scale[:, None]
        context = self.hidden_norm(self.fc(parts.flatten(-2)))  # [B, L, hidden_size]
        context_positions = torch.arange(batch.tokens.shape[1], device=anchors.device)
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)  # [B, A * S]
        positions = positions.clamp_max(len(target.cos) - 1)
        tokens = F.pad(batch.tokens.gather(1, anchors)[..., None], (0, size - 1), value=self._mask_token_id)
        x = F.embedding(tokens, target.embedding).flatten(1, 2).float()  # [B, A * S, hidden_size]
        is_hidden = (context_positions >= anchors[..., None]).repeat_interleave(size, 1)[:, None, None]  # [B, 1, 1, A * S, L]
        cos, sin = target.cos[positions], target.signed_sin[positions]
        context_cos, context_sin = target.cos[context_positions][None], target.signed_sin[context_positions][None]
        for layer in self._decoder:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            x = layer.finish(
                x,
                _attend(
                    attention.query(normed, cos, sin),
                    (attention.key(context, context_cos, context_sin), attention.value(context)),
                    (attention.key(normed, cos, sin), attention.value(normed)),
                    is_hidden,
                    size,
                ),
            )
        return self.norm(x).unflatten(1, (-1, size))


def _attend(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    block: tuple[torch.Tensor, torch.Tensor],
    is_hidden: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """query [B, KV, G, A * S, D]; keys and values [B, KV, L, D] of the context and [B, KV, A * S, D] of the blocks -> as query."""
    rows, num_kv_heads, group, count, head_dim = query.shape
    keys, values = context
    block_keys, block_values = (part.unflatten(2, (-1, size))[:, :, None] for part in block)  # [B, KV, 1, A, S, D]
    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).view(rows, num_kv_heads, group, count, -1).masked_fill(is_hidden, -math.inf)
    own = (query.unflatten(3, (-1, size)) @ block_keys.transpose(-1, -2)).flatten(3, 4)  # [B, KV, G, A * S, S]
    probs = (torch.cat((scores, own), -1).float() * head_dim**-0.5).softmax(-1).to(query.dtype)
    length = keys.shape[2]
    attended = (probs[..., :length].flatten(2, 3) @ values).view_as(query)
    return attended + (probs[..., length:].unflatten(3, (-1, size)) @ block_values).flatten(3, 4)


def _start_qk_norm(attention: Attention, input_norm: torch.Tensor) -> None:
    """Norms that keep queries and keys about as long as they are without norms, for inputs of an rms of 1 before input_norm."""
    for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
        assert isinstance(norm, Norm), f"no norm: {norm}"
        norm.weight.fill_((projection.weight * input_norm.to(projection.weight.device)).square().sum(1).mean().sqrt().item())
