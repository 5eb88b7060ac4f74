"""What one forward pass computes: segments of sequences, flattened without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.engine.kernels.ragged_attention import AttentionPlan, plan_attention


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
    attention_plan: AttentionPlan
    row_starts: tuple[int, ...]  # cu_seqlens_q on the host

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.row_starts[-1]

    @classmethod
    def from_segments(
        cls, segments: Sequence[Segment], block_size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "RaggedBatch":
        """Flattens segments. `dtype` is the model's: attention masks are made in it."""
        assert segments, "a batch needs at least one segment"
        query_lens = np.array([len(s.token_ids) for s in segments], dtype=np.int64)
        starts = np.array([s.start_position for s in segments], dtype=np.int64)
        seq_lens = starts + query_lens
        num_blocks = -(-seq_lens // block_size)
        block_tables = np.zeros((len(segments), int(num_blocks.max())), dtype=np.int32)
        for row, segment in enumerate(segments):
            count = int(num_blocks[row])
            assert query_lens[row] > 0, f"segment {row} has no tokens"
            assert len(segment.block_table) >= count, f"segment {row} needs {count} blocks, its table has {len(segment.block_table)}"
            block_tables[row, :count] = segment.block_table[:count]

        cu_seqlens_q = np.zeros(len(segments) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        rows = np.repeat(np.arange(len(segments)), query_lens)
        positions = np.arange(cu_seqlens_q[-1]) - np.repeat(cu_seqlens_q[:-1] - starts, query_lens)
        slot_mapping = block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        token_ids = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in segments])

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slot_mapping),
            cu_seqlens_q=tensor(cu_seqlens_q.astype(np.int32)),
            seq_lens=tensor(seq_lens.astype(np.int32)),
            block_tables=tensor(block_tables),
            attention_plan=plan_attention(cu_seqlens_q, seq_lens, block_tables, block_size, device, dtype),
            row_starts=tuple(cu_seqlens_q.tolist()),
        )
