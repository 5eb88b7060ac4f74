"""Every kind of head in plain torch, from the tensors of its file: all rows anew for every token, no cache, no batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specwire.engine.sampling.philox import Stream, gumbel, key_to_int64, noise_words
from tests.heads.checkpoints import HEADS, HIDDEN, KV, MASK, VOCAB, Checkpoint

_EPS = 1e-5
_HEAD_DIM = HIDDEN // HEADS
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Noise:
    """How one sequence's tokens are drawn."""

    temperature: float
    key: int
    choice: int = 0

    def draw(self, logits: torch.Tensor, index: int, size: int = VOCAB) -> int:
        """The token of logits [size] at an index."""
        if self.temperature == 0:
            return int(logits.argmax())
        one = [torch.tensor([value]) for value in (key_to_int64(self.key), index, self.choice)]
        return int((logits + self.temperature * gumbel(noise_words(*one, Stream.TARGET, size))[0]).argmax())

    def prob(self, logits: torch.Tensor, token_id: int) -> float:
        return float((logits / (self.temperature or 1.0)).softmax(0)[token_id])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n, heads, head_dim]."""
    angles = positions[:, None].float() / 10_000.0 ** (torch.arange(0, _HEAD_DIM, 2).float() / _HEAD_DIM)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer:
    """One decoder layer by the prefix of its names."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def __call__(self, name: str) -> torch.Tensor:
        return self._weights[f"{self._prefix}.{name}"]

    def heads(self, x: torch.Tensor, part: str, positions: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values [n, heads, head_dim] of rows that are normalised already."""
        bias = self._weights.get(f"{self._prefix}.self_attn.{part}_proj.bias")
        rows = F.linear(x, self(f"self_attn.{part}_proj.weight"), bias).view(len(x), -1, _HEAD_DIM)
        if part == "v":
            return rows
        if f"{self._prefix}.self_attn.{part}_norm.weight" in self._weights:
            rows = norm(rows, self(f"self_attn.{part}_norm.weight"))
        return rotate(rows, positions)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """visible: [queries, keys]."""
        key, value = key.repeat_interleave(HEADS // KV, 1), value.repeat_interleave(HEADS // KV, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / _HEAD_DIM**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)
        return F.linear(mixed.flatten(1), self("self_attn.o_proj.weight"))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        x = norm(x, self("post_attention_layernorm.weight"))
        return F.linear(F.silu(F.linear(x, self("mlp.gate_proj.weight"))) * F.linear(x, self("mlp.up_proj.weight")), self("mlp.down_proj.weight"))

    def causal(self, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """A whole sequence from position 0 on."""
        positions = torch.arange(len(normed))
        query, key, value = (self.heads(normed, part, positions) for part in "qkv")
        residual = residual + self.attend(query, key, value, torch.ones(len(normed), len(normed)).tril().bool())
        return residual + self.feed_forward(residual)

    def plain(self, residual: torch.Tensor) -> torch.Tensor:
        return self.causal(norm(residual, self("input_layernorm.weight")), residual)


class Reference:
    """Drafts of a checkpoint.

    Args:
        checkpoint: of the head.
        target: the target's tensors, for what the head shares.
    """

    def __init__(self, checkpoint: Checkpoint, target: Weights) -> None:
        self._config = {**checkpoint.config, **checkpoint.config.get("eagle_config", {}), **checkpoint.config.get("dflash_config", {})}
        self._weights = {name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor for name, tensor in checkpoint.tensors.items()}
        self._embedding = self._weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        self._ids = torch.arange(len(self._weights["d2t"])) + self._weights["d2t"] if "d2t" in self._weights else torch.arange(VOCAB)
        self._output = self._weights.get("lm_head.weight", target["lm_head.weight"][self._ids])
        mask = checkpoint.folder / "mask_embedding.pt"
        if mask.is_file():
            self._embedding = self._embedding.clone()
            self._embedding[MASK] = torch.load(mask)["embedding"]

    def drafts(self, token_ids: Sequence[int], features: torch.Tensor, num_drafts: int, noise: Noise) -> tuple[list[int], list[float]]:
        """Drafts and scores behind n tokens with features [n - 1, width]."""
        with torch.no_grad():
            if "fc.weight" in self._weights and "hidden_norm.weight" in self._weights:
                return self._block(token_ids, features, num_drafts, noise)
            return self._sequential(token_ids, features, num_drafts, noise)

    def _all_logits(self, drafted: torch.Tensor) -> torch.Tensor:
        return torch.full((VOCAB,), -torch.inf).index_copy(0, self._ids, drafted)

    def _sequential(self, token_ids: Sequence[int], features: torch.Tensor, num_drafts: int, noise: Noise) -> tuple[list[int], list[float]]:
        tokens, known = list(token_ids[1:]), features
        drafts: list[int] = []
        scores: list[float] = []
        for _ in range(num_drafts):
            output, carried = self._rows(self._embedding[torch.tensor(tokens)], known)
            logits = self._all_logits(self._output @ output)
            drafts.append(noise.draw(logits, len(tokens) + 1))
            scores.append(noise.prob(logits, drafts[-1]))
            tokens.append(drafts[-1])
            known = torch.cat((known, carried[None]))
        return drafts, scores

    def _rows(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output layer reads of the last row, and the feature of the row after it."""
        weights = self._weights
        if "mtp_layers.0.input_proj.weight" in weights:
            layer = Layer(weights, "mtp_layers.0")
            halves = [norm(features, layer("hidden_layernorm.weight")), norm(embedded, layer("token_layernorm.weight"))]
            if "speculators_model_type" in self._config:
                halves.reverse()
            last = norm(layer.plain(F.linear(torch.cat(halves, -1), layer("input_proj.weight"))), layer("final_layernorm.weight"))[-1]
            return last, last
        others = [Layer(weights, f"layers.{i}") for i in range(1, self._num_layers())]
        layer = Layer(weights, "layers.0")
        if "layers.0.hidden_norm.weight" not in weights:  # EAGLE
            fused = F.linear(torch.cat((embedded, features), -1), weights["fc.weight"], weights["fc.bias"])
            rows = layer.causal(fused, fused)
            for other in others:
                rows = other.plain(rows)
            return rows[-1], rows[-1]
        normed = norm(features, layer("hidden_norm.weight"))
        joined = torch.cat((norm(embedded, layer("input_layernorm.weight")), normed), -1)
        rows = layer.causal(joined, normed if self._config.get("norm_before_residual") else features)
        for other in others:
            rows = other.plain(rows)
        output = norm(rows[-1], weights["norm.weight"])
        return output, output if self._config.get("norm_output") else rows[-1]

    def _num_layers(self) -> int:
        return len({name.split(".")[1] for name in self._weights if name.startswith("layers.")})

    def _block(self, token_ids: Sequence[int], features: torch.Tensor, num_drafts: int, noise: Noise) -> tuple[list[int], list[float]]:
        config, weights, num_tokens = self._config, self._weights, len(token_ids)
        size, context = config["block_size"], norm(features, weights["hidden_norm.weight"])
        residual = self._embedding[torch.tensor([token_ids[-1]] + [MASK] * (size - 1))]
        places, positions = torch.arange(num_tokens - 1), torch.arange(num_tokens - 1, num_tokens - 1 + size)
        inside = torch.ones(size, size).tril().bool() if config.get("causal") else torch.ones(size, size).bool()
        visible = torch.cat((torch.ones(size, num_tokens - 1).bool(), inside), 1)
        for index in range(self._num_layers()):
            layer = Layer(weights, f"layers.{index}")
            normed = norm(residual, layer("input_layernorm.weight"))
            key = torch.cat((layer.heads(context, "k", places), layer.heads(normed, "k", positions)))
            value = torch.cat((layer.heads(context, "v", places), layer.heads(normed, "v", positions)))
            residual = residual + layer.attend(layer.heads(normed, "q", positions), key, value, visible)
            residual = residual + layer.feed_forward(residual)
        rows = norm(residual, weights["norm.weight"])
        is_dspark = "markov_head.markov_w1.weight" in weights
        rows = rows[0 if is_dspark and config.get("sample_from_anchor", True) else 1 :]
        drafts: list[int] = []
        scores: list[float] = []
        for position in range(num_drafts):
            previous = drafts[-1] if drafts else token_ids[-1]
            logits = self._output @ rows[position]
            if is_dspark:
                logits = self._biased(logits, previous)
            full = self._all_logits(logits)
            drafts.append(noise.draw(full, num_tokens + position))
            scores.append(self._confidence(rows[position], previous, position) if is_dspark else noise.prob(full, drafts[-1]))
        return drafts, scores

    def _biased(self, logits: torch.Tensor, previous: int) -> torch.Tensor:
        bias = self._weights["markov_head.markov_w2.weight"] @ self._weights["markov_head.markov_w1.weight"][previous]
        count = self._config.get("dspark_draft_topk", len(logits))
        left_out = logits < logits.sort(descending=True).values[count - 1]
        return (logits + bias).masked_fill(left_out, -torch.inf)

    def _confidence(self, row: torch.Tensor, previous: int, position: int) -> float:
        weights, config = self._weights, self._config
        if config["confidence_head_with_markov"]:
            row = torch.cat((row, weights["markov_head.markov_w1.weight"][previous]))
        temperatures = config.get("confidence_temperatures", [1.0])
        value = weights["confidence_head.proj.weight"][0] @ row + weights["confidence_head.proj.bias"][0]
        return float((value / temperatures[min(position, len(temperatures) - 1)]).sigmoid())
