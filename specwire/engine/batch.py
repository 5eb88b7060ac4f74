"""What one forward pass computes: segments of sequences, flattened without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.engine.kernels.ragged_attention import AttentionPlan, plan_attention, slot_table


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence whose KV is computed in this pass.

    Args:
        token_ids: the tokens, at least one.
        start_position: index of the first one in the sequence; KV of all earlier positions is in the cache already.
        block_table: the sequence's blocks in order, covering at least start_position + len(token_ids) tokens.
    """

    token_ids: Sequence[int]
    start_position: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """S segments, T tokens in all; tensors live on the model's device."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64, block * block_size + offset
    cu_seqlens_q: torch.Tensor  # [S + 1] int32, first token row of each segment
    seq_lens: torch.Tensor  # [S] int32, positions that the last token of each segment attends to
    block_tables: torch.Tensor  # [S, max_blocks] int32, padded with 0
    attention_plan: AttentionPlan | None  # None for a model that attends by the block tables
    row_starts: tuple[int, ...]  # cu_seqlens_q on the host

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.row_starts[-1]

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[Segment],
        block_size: int,
        query_heads_per_kv_head: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        plans_attention: bool = True,
        is_causal: bool = True,
    ) -> "RaggedBatch":
        """Flattens segments. Heads, device and dtype are the model's; attention masks are made to fit them if it plans attention. Without
        is_causal every token of a segment attends to all of the segment."""
        assert segments, "a batch needs at least one segment"
        query_lens = np.array([len(s.token_ids) for s in segments], dtype=np.int64)
        starts = np.array([s.start_position for s in segments], dtype=np.int64)
        assert query_lens.min() > 0, f"a segment has no tokens: {query_lens}"
        seq_lens = starts + query_lens
        num_blocks = (-(-seq_lens // block_size)).tolist()
        block_tables = np.zeros((len(segments), max(num_blocks)), dtype=np.int32)
        for row, (segment, count) in enumerate(zip(segments, num_blocks, strict=True)):
            assert len(segment.block_table) >= count, f"segment {row} needs {count} blocks, its table has {len(segment.block_table)}"
            block_tables[row, :count] = segment.block_table[:count]

        cu_seqlens_q = np.zeros(len(segments) + 1, dtype=np.int64)
        query_lens.cumsum(out=cu_seqlens_q[1:])
        positions = np.arange(cu_seqlens_q[-1]) + (starts - cu_seqlens_q[:-1]).repeat(query_lens)
        slots = slot_table(block_tables, block_size)
        slot_mapping = slots[np.arange(len(segments)).repeat(query_lens), positions]
        token_ids = np.array([token for segment in segments for token in segment.token_ids], dtype=np.int64)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slot_mapping),
            cu_seqlens_q=tensor(cu_seqlens_q.astype(np.int32)),
            seq_lens=tensor(seq_lens.astype(np.int32)),
            block_tables=tensor(block_tables),
            attention_plan=plan_attention(cu_seqlens_q, seq_lens, slots, query_heads_per_kv_head, device, dtype, is_causal=is_causal)
            if plans_attention
            else None,
            row_starts=tuple(cu_seqlens_q.tolist()),
        )
