"""A trainable EAGLE-3 head (https://arxiv.org/abs/2503.01840), unrolled in training over as many drafts as it will make.

Row i of the first pass has the target's features of token i and the embedding of token i + 1, and predicts token i + 2. Row i of pass j has the
head's own output of pass j - 1 instead, stands j - 1 positions later, and attends to rows 0..i of the first pass and to row i of the others.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from specwire.train.batches import Batch
from specwire.train.loss import product
from specwire.train.modules import START_SHARPNESS, Drafted, HeadShape, Layer, Norm, Pairs, draft_signals, residual_rms, shifted
from specwire.train.noise import Noise
from specwire.train.recipe import Recipe
from specwire.train.target import Target, causal_attention


class Eagle3Head(nn.Module):
    """The weights that a checkpoint holds; embedding and output layer are the target's and frozen.

    Args:
        recipe: num_layers, num_draft_tokens, position_decay.
        target: whose shape and tables it has.
        num_features: feature layers.
        draft_ids: [draft_vocab_size] ids that can be drafted; None = all.
    """

    def __init__(self, recipe: Recipe, target: Target, num_features: int, draft_ids: torch.Tensor | None) -> None:
        super().__init__()
        shape = HeadShape.of(target.config)
        self._recipe, self._target, self._num_features = recipe, target, num_features
        self._draft_ids = draft_ids
        self.feature_norms = [Norm(shape.hidden_size, shape.eps) for _ in range(num_features)]
        self.fc_norm = nn.ModuleList(self.feature_norms)
        self.fc = nn.Linear(num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.decoder = [
            Layer(shape, shape.hidden_size * (2 if index == 0 else 1), has_qk_norm=target.config.qk_norm, has_hidden_norm=index == 0)
            for index in range(recipe.num_layers)
        ]
        self.layers = nn.ModuleList(self.decoder)
        self.norm = Norm(shape.hidden_size, shape.eps)

    @property
    def bias_head(self) -> None:
        """None: no bias by the previous token."""
        return None

    def start(self, batch: Batch) -> None:
        """Starts from the target: its last layers over the last feature layer."""
        rms = residual_rms(batch, self._num_features)[-1].item()
        with torch.no_grad():
            self.fc.weight.normal_(0.0, 0.002)
            self.fc.weight[:, -self.fc.out_features :] += torch.eye(self.fc.out_features, device=self.fc.weight.device)
            self.norm.weight.copy_(self._target.final_norm() * START_SHARPNESS)
        for layer, tensors in zip(self.decoder, self._target.last_layers(len(self.decoder)), strict=True):
            layer.start_from(tensors, rms)

    def pairs(self, batch: Batch, generator: torch.Generator | None = None) -> Pairs:
        """All drafts of the batch's answers, tokens before them as they are in the answer."""
        num_passes, (num_rows, length) = self._recipe.num_draft_tokens, batch.tokens.shape
        outputs = _Passes(self, batch)
        columns = torch.arange(length, device=batch.tokens.device)
        hidden, is_draft = [], []
        for number in range(1, num_passes + 1):
            output = outputs.run(shifted(batch.tokens, number))
            # Row i predicts token i + 1 + number, whose target is the hidden state of the token before.
            hidden.append(F.pad(output, (0, 0, number, 0))[:, :length])
            row = columns - number
            is_draft.append((row >= batch.prompt_lens[:, None] - 1) & (columns + 1 < batch.lengths[:, None]))
        drafts = torch.stack(is_draft).flatten(1)  # [M, B * L]
        rows = drafts.any(0).nonzero()[:, 0]
        positions = torch.arange(num_passes, device=rows.device)[:, None].expand(-1, len(rows))
        weights = drafts[:, rows] * self._recipe.position_decay**positions
        stacked = torch.stack(hidden).view(num_passes, num_rows * length, -1)[:, rows]
        return Pairs(stacked, weights.float(), positions, rows, None)

    @torch.no_grad()
    def drafts(self, batch: Batch, noise: Noise | None = None) -> Drafted:
        """What it drafts behind each token, fed by its own tokens."""
        outputs = _Passes(self, batch)
        tokens = shifted(batch.tokens, 1)
        drafted, signals = [], []
        for number in range(self._recipe.num_draft_tokens):
            output = outputs.run(tokens)
            tokens, signal = self._draw(output, number + 2, noise)
            tokens, signal = tokens.view(batch.tokens.shape), signal.view(*batch.tokens.shape, -1)
            drafted.append(tokens)
            signals.append(signal)
        # Row i drafts behind token i + 1.
        return Drafted(F.pad(torch.stack(drafted, -1), (0, 0, 1, 0))[:, :-1], F.pad(torch.stack(signals, -2), (0, 0, 0, 0, 1, 0))[:, :-1])

    def _draw(self, output: torch.Tensor, distance: int, noise: Noise | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B * L] and signals [B * L, 3] of output [B, L, hidden_size], whose row i drafts token i + distance."""
        head = self._target.head if self._draft_ids is None else self._target.head[self._draft_ids]
        num_rows, length = output.shape[:2]
        places = torch.arange(num_rows * length, device=output.device)
        tokens, signals = [], []
        for place in places.split(max(1, 2**27 // len(head)) if output.device.type == "cuda" else 64):
            logits = product(output.flatten(0, 1)[place], head)
            if noise is None:
                log_probs = logits.log_softmax(-1)
                chosen = log_probs.argmax(-1)
            else:
                rows = place // length
                candidates = None if self._draft_ids is None else self._draft_ids.expand(len(place), -1)
                chosen = noise.choose(logits, rows, place % length + distance, candidates)
                log_probs = noise.log_probs(logits, rows)
            tokens.append(chosen if self._draft_ids is None else self._draft_ids[chosen])
            signals.append(draft_signals(log_probs, chosen))
        return torch.cat(tokens), torch.cat(signals)


class _Passes:
    """Passes over one batch, with the keys and values of those before."""

    def __init__(self, head: Eagle3Head, batch: Batch) -> None:
        self._head, self._target = head, head._target
        parts = batch.features.unflatten(-1, (head._num_features, -1)).unbind(-2)
        self._hidden = head.fc(torch.cat([norm(part) for norm, part in zip(head.feature_norms, parts, strict=True)], -1))
        self._positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        self._keys: list[list[torch.Tensor]] = [[] for _ in head.decoder]
        self._values: list[list[torch.Tensor]] = [[] for _ in head.decoder]
        self._number = 0

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next pass, tokens [B, L] beside the hidden states; returns what the output layer reads [B, L, hidden_size]."""
        target = self._target
        positions = (self._positions + self._number).clamp_max(len(target.cos) - 1)
        cos, sin = target.cos[positions][None], target.signed_sin[positions][None]
        embedded = F.embedding(tokens, target.embedding)
        for index, layer in enumerate(self._head.decoder):
            normed = layer.input_layernorm(embedded if index == 0 else self._hidden)
            x = torch.cat((normed, layer.hidden_norm(self._hidden)), -1) if index == 0 else normed
            attention = layer.self_attn
            keys, values = self._keys[index], self._values[index]
            keys.append(attention.key(x, cos, sin))
            values.append(attention.value(x))
            self._hidden = layer.finish(self._hidden, _attend(attention.query(x, cos, sin), keys, values))
        self._number += 1
        return self._head.norm(self._hidden)


def _attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """query [B, KV, G, L, D], keys and values [B, KV, L, D] of each pass: causal in the first, to the same row in the others."""
    rows, num_kv_heads, group, length, head_dim = query.shape
    if len(keys) == 1:
        return causal_attention(query.flatten(1, 2), keys[0], values[0]).view_as(query)
    scores = (query.flatten(2, 3) @ keys[0].transpose(-1, -2)).view(rows, num_kv_heads, group, length, length)
    is_later = torch.ones((length, length), dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(is_later, -math.inf)
    own = [(query * key[:, :, None]).sum(-1, keepdim=True) for key in keys[1:]]  # [B, KV, G, L, 1]
    probs = (torch.cat((scores, *own), -1).float() * head_dim**-0.5).softmax(-1).to(query.dtype)
    attended = (probs[..., :length].flatten(2, 3) @ values[0]).view_as(query)
    for index, value in enumerate(values[1:]):
        attended = attended + probs[..., length + index, None] * value[:, :, None]
    return attended
