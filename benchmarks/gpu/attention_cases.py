"""Ragged batches over one paged cache, and what attention over them should give."""

from dataclasses import dataclass, replace

import torch

from specwire.engine.kernels.paged_attention import paged_attention
from specwire.engine.kernels.work_list import AttentionScratch, AttentionTuning, DeviceAttentionPlan

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of one layer of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.num_kv_heads * self.head_dim * 2


LLAMA_8B = Shape("llama-8b", 32, 8, 128)
LLAMA_1B = Shape("llama-1b", 32, 8, 64)
SMOLLM2_135M = Shape("smollm2-135m", 9, 3, 64)


def random_cache(shape: Shape, num_tokens: int) -> torch.Tensor:
    """One layer for so many tokens, bfloat16; the last block, which belongs to nobody, holds NaN."""
    cache = torch.empty((-(-num_tokens // BLOCK_SIZE) + 1, BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim), dtype=torch.bfloat16, device="cuda")
    for part in cache.split(2**16):
        part.normal_()
    cache[-1] = float("nan")
    return cache


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests with (query tokens, positions) each, their blocks in random order over the cache."""

    shape: Shape
    segments: list[tuple[int, int]]
    query: torch.Tensor
    cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, segments: list[tuple[int, int]], cache: torch.Tensor) -> "Batch":
        """Blocks are drawn without repetition as long as there are any; padding of the block tables points past them all."""
        counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in segments]
        order = torch.randperm(len(cache) - 1, device="cuda")[: sum(counts)].int()
        tables = torch.full((len(segments), max(counts)), len(cache) - 1, dtype=torch.int32, device="cuda")
        for row, part in enumerate(order.split(counts)):
            tables[row, : len(part)] = part
        starts = torch.tensor([0] + [query_len for query_len, _ in segments]).cumsum(0)
        query = torch.randn(int(starts[-1]), shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        seq_lens = torch.tensor([seq_len for _, seq_len in segments], dtype=torch.int32, device="cuda")
        return cls(shape, segments, query, cache, starts.int().cuda(), seq_lens, tables)

    def layers(self, count: int) -> list["Batch"]:
        """The batch in so many layers: other queries, keys and values, the same block tables."""
        caches = [random_cache(self.shape, (len(self.cache) - 1) * BLOCK_SIZE) for _ in range(count - 1)]
        return [self, *(replace(self, query=torch.randn_like(self.query), cache=cache) for cache in caches)]

    @property
    def num_bytes(self) -> int:
        """What must be read and written: keys and values once, queries, outputs."""
        return sum(seq_len for query_len, seq_len in self.segments if query_len) * self.shape.kv_bytes + 4 * self.query.numel()

    @property
    def num_operations(self) -> int:
        """Of the products of visible pairs of query and key."""
        pairs = sum(query_len * seq_len - query_len * (query_len - 1) // 2 for query_len, seq_len in self.segments)
        return 4 * pairs * self.shape.num_heads * self.shape.head_dim

    def plan(self, tuning: AttentionTuning, max_query_len: int | None = None, max_num_tokens: int | None = None) -> DeviceAttentionPlan:
        """A plan for this batch, by default as tight as can be."""
        longest = max_query_len or max(query_len for query_len, _ in self.segments)
        scratch = AttentionScratch(self.shape.num_kv_heads, self.shape.head_dim, "cuda", tuning)
        tokens = max_num_tokens or max(len(self.query), longest)
        plan = DeviceAttentionPlan(scratch, len(self.segments), tokens, longest, self.shape.num_heads)
        plan.update(self.cu_seqlens_q, self.seq_lens)
        return plan

    def attend(self, plan: DeviceAttentionPlan, output: torch.Tensor) -> None:
        """Runs the kernel."""
        paged_attention(self.query, self.cache, self.block_tables, self.shape.head_dim**-0.5, plan, output)

    def reference(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Attention in a wider dtype; NaN in rows of no request."""
        output = torch.full(self.query.shape, float("nan"), dtype=dtype, device="cuda")
        group = self.shape.num_heads // self.shape.num_kv_heads
        first = 0
        for row, (query_len, seq_len) in enumerate(self.segments):
            if query_len and seq_len:
                table = self.block_tables[row, : -(-seq_len // BLOCK_SIZE)].long()
                key, value = self.cache[table].flatten(0, 1)[:seq_len].to(dtype).permute(1, 2, 0, 3)  # [KV, L, D] each
                query = (
                    self.query[first : first + query_len].to(dtype).view(query_len, -1, group, self.shape.head_dim).permute(1, 2, 0, 3)
                )  # [KV, G, Q, D]
                score = query @ key[:, None].transpose(-1, -2) * self.shape.head_dim**-0.5
                visible = torch.ones(query_len, seq_len, dtype=torch.bool, device="cuda").tril(seq_len - query_len)
                result = score.masked_fill_(~visible, -torch.inf).softmax(-1) @ value[:, None]
                output[first : first + query_len] = result.permute(2, 0, 1, 3).reshape(query_len, -1, self.shape.head_dim)
            first += query_len
        return output
