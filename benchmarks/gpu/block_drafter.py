"""Drafting method `synthetic`: any ids, for what a head that drafts a whole block at once would take. One pass of one layer and the output head,
both of the target's shape, over K + 1 tokens of each sequence, so that its time hardly depends on K."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from drafter_svc.method import Ask, Drafts
from specwire.config import DrafterConfig
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.capture import capture_graphs
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.models.config import ModelConfig
from specwire.engine.runner import set_num_threads
from specwire.messages import DraftOpen, RowStatus, ServiceDescription

_MASK = 0
"""Id of the tokens behind a sequence's last one."""


@dataclass(frozen=True, slots=True)
class _Weights:
    qkv: torch.Tensor  # [(H + 2 KV) * D, hidden_size]
    o: torch.Tensor  # [hidden_size, H * D]
    gate_up: torch.Tensor  # [2 * intermediate_size, hidden_size]
    down: torch.Tensor  # [hidden_size, intermediate_size]
    head: torch.Tensor  # [vocab_size, hidden_size]; the embedding, too
    norm: torch.Tensor  # [hidden_size]

    @classmethod
    def random(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> "_Weights":
        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02)

        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        return cls(
            qkv=weight(inner + 2 * config.num_kv_heads * config.head_dim, hidden),
            o=weight(hidden, inner),
            gate_up=weight(2 * config.intermediate_size, hidden),
            down=weight(hidden, config.intermediate_size),
            head=weight(config.vocab_size, hidden),
            norm=torch.ones(hidden, device=device, dtype=dtype),
        )


class BlockPass:
    """The pass: padded to some sizes, each a graph on a CUDA device. Attention stays within groups of K_max + 1 tokens, and there is no KV cache: its
    share of such a pass is small.

    Args:
        config: shape of the layer and the head; made-up weights.
        limits: sequences and drafts, from which the sizes follow.
    """

    def __init__(self, config: ModelConfig, limits: RoundLimits, device: torch.device) -> None:
        self._config, self._group = config, limits.max_query_len
        self._weights = _Weights.random(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self._sizes = sorted({-(-size // self._group) * self._group for size in limits.graph_sizes()})
        on_host = torch.zeros(self._sizes[-1], dtype=torch.int64)
        self._host = on_host.pin_memory() if device.type == "cuda" else on_host
        self._ids = self._host.to(device)
        self._drafts = torch.zeros_like(self._ids)
        self._runs = [partial(self._forward, size) for size in self._sizes]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @torch.inference_mode()
    def capture(self) -> None:
        """On a CUDA device; the sizes with the largest first."""
        self._graphs = capture_graphs(self._runs[::-1], lambda done, total: None)[::-1]

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> list[int]:
        """An id for each token."""
        number = len(token_ids)
        index = bisect_left(self._sizes, number)
        size = self._sizes[index]
        self._host[:number] = torch.tensor(token_ids)
        self._ids[:size].copy_(self._host[:size], non_blocking=True)
        if self._graphs:
            self._graphs[index].replay()
        else:
            self._runs[index]()
        return self._drafts[:number].tolist()

    def _forward(self, size: int) -> None:
        config, weights, group = self._config, self._weights, self._group
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        shape = (config.hidden_size,)
        residual = F.embedding(self._ids[:size], weights.head)
        heads = F.linear(F.rms_norm(residual, shape, weights.norm), weights.qkv).view(size // group, group, -1, head_dim).transpose(1, 2)
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
        repeats = num_heads // num_kv_heads
        attended = F.scaled_dot_product_attention(query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
        residual = residual + F.linear(attended.transpose(1, 2).reshape(size, num_heads * head_dim), weights.o)
        gate, up = F.linear(F.rms_norm(residual, shape, weights.norm), weights.gate_up).chunk(2, -1)
        residual = residual + F.linear(F.silu(gate) * up, weights.down)
        self._drafts[:size] = F.linear(F.rms_norm(residual, shape, weights.norm), weights.head).argmax(-1)


class Synthetic:
    """The method.

    Args:
        block: for at least so many sequences and drafts.
        max_num_drafts: most drafts at once (K).
    """

    features = None

    def __init__(self, block: BlockPass, *, max_num_drafts: int, max_num_seqs: int, max_model_len: int, vocab_size: int, device: str) -> None:
        self.counts = PassCounts()
        self._block = block
        self._max_num_drafts, self._max_model_len = max_num_drafts, max_model_len
        self._last: dict[int, tuple[int, int]] = {}  # by sequence: its last token, and how many it has
        self._description = ServiceDescription(
            model_id="synthetic block",
            instance_id="",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_draft_tokens=max_num_drafts,
            max_num_seqs=max_num_seqs,
            method="synthetic",
            device=device,
        )

    @classmethod
    def from_config(cls, config: DrafterConfig) -> "Synthetic":
        """The shape is that of the configured model."""
        spec, device = config.speculative_config, torch.device(config.device)
        assert spec.model is not None, "the shape of the layer is that of a model"
        set_num_threads(config.num_threads)
        shape = ModelConfig.from_folder(Path(spec.model))
        max_num_drafts = spec.num_speculative_tokens
        limits = RoundLimits(config.max_num_seqs, max_num_drafts, config.max_num_seqs * (max_num_drafts + 1), 1)
        block = BlockPass(shape, limits, device)
        if device.type == "cuda":
            block.capture()
        return cls(
            block,
            max_num_drafts=max_num_drafts,
            max_num_seqs=config.max_num_seqs,
            max_model_len=spec.max_model_len or shape.max_position_embeddings,
            vocab_size=shape.vocab_size,
            device=str(device),
        )

    @property
    def description(self) -> ServiceDescription:
        return self._description

    @property
    def num_free_blocks(self) -> int:
        return 0

    def open(self, seq_id: int, request: DraftOpen) -> None:
        self._last[seq_id] = request.token_ids[-1], len(request.token_ids)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._last[seq_id] = token_ids[-1], self._last[seq_id][1] + len(token_ids)

    def close(self, seq_id: int) -> None:
        del self._last[seq_id]

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        token_ids: list[int] = []
        numbers: list[int] = []
        for seq_id, num_drafts in asks:
            last, length = self._last[seq_id]
            number = max(0, min(num_drafts, self._max_num_drafts, self._max_model_len - length))
            numbers.append(number)
            if number:
                token_ids += [last, *[_MASK] * number]
        found = self._block.run(token_ids) if token_ids else []
        self._count(len(token_ids))
        answers, start = [], 0
        for number in numbers:
            answers.append(Drafts(RowStatus.OK, found[start : start + number], [0.5] * number))
            start += number + 1 if number else 0
        return answers

    def catch_up(self, budget: int) -> int:
        """Nothing to do: there is no KV."""
        return 0

    def _count(self, num_tokens: int) -> None:
        if num_tokens:
            self.counts.num_eager_passes += 1
            self.counts.num_tokens += num_tokens
