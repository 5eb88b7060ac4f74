"""What drafting has on the device: the inputs of one pass, and what stays from the first pass of a call to the last."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What the model reads in a pass of R rows (one a sequence) and T tokens, padding included.

    Padding tokens are token 0 at position 0 in the scratch block.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64, block * block_size + offset
    cu_seqlens_q: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32: tokens up to the pass's last one, which is also the index of the token drafted next; 0: padding
    block_tables: torch.Tensor  # [R, max_blocks] int32, filled as far as the drafts reach

    @classmethod
    def allocate(cls, num_rows: int, num_tokens: int, block_tables: torch.Tensor) -> "DraftInputs":
        """Padding alone, a token a row. block_tables may be those of other passes: rows keep their places."""
        device = block_tables.device
        token_ids, positions, slot_mapping = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
        return cls(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            block_tables=block_tables,
        )

    def first(self, num_rows: int, num_tokens: int) -> "DraftInputs":
        """Views for a smaller pass: every size reads and writes the same memory."""
        return DraftInputs(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            cu_seqlens_q=self.cu_seqlens_q[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_tables=self.block_tables[:num_rows],
        )


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The R rows of a call, by falling number of drafts; the first pass derives all but the results from the upload."""

    last_rows: torch.Tensor  # [R] int64, token row of each sequence's last token in the first pass; padding: 0
    num_tokens: torch.Tensor  # [R] int32, committed tokens of each sequence
    num_drafts: torch.Tensor  # [R] int32; padding: 0
    temperatures: torch.Tensor  # [R] float32, 0 is greedy
    keys: torch.Tensor  # [R] int64, two's complement
    choices: torch.Tensor  # [R] int32
    results: torch.Tensor  # [R, 2, K] int32: drafts, and the bits of their float32 probabilities

    @classmethod
    def allocate(cls, num_rows: int, num_drafts: int, device: torch.device | str) -> "DraftRows":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            last_rows=zeros(num_rows, dtype=torch.int64),
            num_tokens=zeros(num_rows),
            num_drafts=zeros(num_rows),
            temperatures=zeros(num_rows, dtype=torch.float32),
            keys=zeros(num_rows, dtype=torch.int64),
            choices=zeros(num_rows),
            results=zeros(num_rows, 2, num_drafts),
        )

    def first(self, num_rows: int) -> "DraftRows":
        """Views of the first rows."""
        fields = (self.last_rows, self.num_tokens, self.num_drafts, self.temperatures, self.keys, self.choices, self.results)
        return DraftRows(*(field[:num_rows] for field in fields))
