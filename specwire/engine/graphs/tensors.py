"""What a round has on the device: the state of all slots, and the inputs that the kernels derive from the upload."""

from dataclasses import dataclass, fields

import torch

from specwire.engine.graphs.asks import ASKED
from specwire.sampling_params import MAX_LOGPROBS

DEAD = -(2**30)
"""First number of a result of a row whose slot went bad before."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The sizes that everything on the device is made for.

    Args:
        max_num_seqs: slots (N).
        max_num_draft_tokens: most drafts of a row (K).
        max_num_batched_tokens: most tokens of a round, prefill included.
        max_model_len: most tokens of a sequence.
    """

    max_num_seqs: int
    max_num_draft_tokens: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def max_query_len(self) -> int:
        """Tokens of the longest row that a graph takes."""
        return self.max_num_draft_tokens + 1

    @property
    def max_graph_tokens(self) -> int:
        """Tokens of the largest graph, also the most rows of logits of any round."""
        return min(self.max_num_seqs * self.max_query_len, self.max_num_batched_tokens)

    def graph_sizes(self) -> list[int]:
        """Token counts to capture, rising: 1, 2, 4, multiples of 8, from 128 on eight to each doubling (at most an eighth is padding)."""
        sizes, size = [1, 2, 4], 8
        while size < self.max_graph_tokens:
            sizes.append(size)
            size += max(8, 2 ** (size.bit_length() - 1) // 8)
        return [size for size in sizes if size < self.max_graph_tokens] + [self.max_graph_tokens]


def num_bytes(tensors: "SlotState | RoundInputs") -> int:
    """Memory of all tensors together."""
    return sum(getattr(tensors, field.name).nbytes for field in fields(tensors))


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the device keeps of N slots between rounds, and nobody else knows in time: a round may go on from a token that no host has seen.

    Lengths are not among it: the host knows the length of every row that it launches. The tables over the vocabulary are read for slots that
    ask for them alone (`asks`); a word is how often the sequence emitted the token, `seen_bit` if it also counts as seen, `stop_bit` if it ends
    the sequence.
    """

    last_tokens: torch.Tensor  # [N] int32; -1: the slot went bad
    temperatures: torch.Tensor  # [N] float32, 0 is greedy
    keys: torch.Tensor  # [N] int64, two's complement
    choices: torch.Tensor  # [N] int32
    block_tables: torch.Tensor  # [N, max_blocks] int32
    asked: torch.Tensor  # [N, ASKED] int32, see `asks`
    thresholds: torch.Tensor  # [N, K] int64, see `asks.acceptance_thresholds`
    adjustments: torch.Tensor  # [N, vocab_size] float32
    words: torch.Tensor  # [N, vocab_size] int16, or int32 for sequences of more than 2**13 tokens

    @classmethod
    def allocate(cls, limits: RoundLimits, block_size: int, device: torch.device | str, vocab_size: int = 0) -> "SlotState":
        """All slots empty; none of them may ask for processors if vocab_size is 0."""
        num_slots, max_blocks = limits.max_num_seqs, -(-limits.max_model_len // block_size)
        word_type = torch.int16 if limits.max_model_len <= 2**13 else torch.int32
        return cls(
            last_tokens=torch.zeros(num_slots, dtype=torch.int32, device=device),
            temperatures=torch.zeros(num_slots, dtype=torch.float32, device=device),
            keys=torch.zeros(num_slots, dtype=torch.int64, device=device),
            choices=torch.zeros(num_slots, dtype=torch.int32, device=device),
            block_tables=torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device),
            asked=torch.zeros((num_slots, ASKED), dtype=torch.int32, device=device),
            thresholds=torch.zeros((num_slots, limits.max_num_draft_tokens), dtype=torch.int64, device=device),
            adjustments=torch.zeros((num_slots, vocab_size), dtype=torch.float32, device=device),
            words=torch.zeros((num_slots, vocab_size), dtype=word_type, device=device),
        )

    @property
    def stop_bit(self) -> int:
        """Of a word; the bits below it are the count."""
        return 1 << (8 * self.words.element_size() - 3)

    @property
    def seen_bit(self) -> int:
        """Of a word."""
        return 1 << (8 * self.words.element_size() - 2)

    @property
    def num_table_bytes(self) -> int:
        """Memory of the tables over the vocabulary."""
        return self.adjustments.nbytes + self.words.nbytes


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """What the model and the sampler read in a round of R requests, T tokens and L rows of logits, padding included, and what comes out.

    Padding tokens are token 0 at position 0 in the scratch block; padding requests have no tokens; padding rows of logits repeat token row 0.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64, block * block_size + offset
    cu_seqlens_q: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32; 0: padding, or a dead slot
    block_tables: torch.Tensor  # [R, max_blocks] int32, filled as far as seq_lens reach
    logit_starts: torch.Tensor  # [R + 1] int32, first row of logits of each request
    logit_rows: torch.Tensor  # [L] int64, their token rows
    temperatures: torch.Tensor  # [L] float32
    keys: torch.Tensor  # [L] int64
    indices: torch.Tensor  # [L] int64, absolute index of the sampled token
    choices: torch.Tensor  # [L] int64
    slots: torch.Tensor  # [R] int32
    requests: torch.Tensor  # [L] int32
    asks: torch.Tensor  # [L] int32, flags of `asks`; 0 for rows that don't sample
    cut_values: torch.Tensor  # [L] float32, see `row_ops_torch.find_cuts`
    cut_ids: torch.Tensor  # [L] int32
    results: torch.Tensor  # [R, K + 2] int32, see `round_ops_torch.accept`
    logprobs: torch.Tensor  # [L, 1 + MAX_LOGPROBS] float32, see `row_ops_torch.report_logprobs`
    logprob_ids: torch.Tensor  # [L, MAX_LOGPROBS] int32

    @classmethod
    def allocate(cls, limits: RoundLimits, max_blocks: int, device: torch.device | str) -> "RoundInputs":
        """Of the largest round."""
        num_tokens, num_requests = max(limits.max_num_batched_tokens, limits.max_graph_tokens), limits.max_num_seqs
        num_rows = limits.max_graph_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            slot_mapping=zeros(num_tokens),
            cu_seqlens_q=zeros(num_requests + 1, dtype=torch.int32),
            seq_lens=zeros(num_requests, dtype=torch.int32),
            block_tables=zeros(num_requests, max_blocks, dtype=torch.int32),
            logit_starts=zeros(num_requests + 1, dtype=torch.int32),
            logit_rows=zeros(num_rows),
            temperatures=zeros(num_rows, dtype=torch.float32),
            keys=zeros(num_rows),
            indices=zeros(num_rows),
            choices=zeros(num_rows),
            slots=zeros(num_requests, dtype=torch.int32),
            requests=zeros(num_rows, dtype=torch.int32),
            asks=zeros(num_rows, dtype=torch.int32),
            cut_values=zeros(num_rows, dtype=torch.float32),
            cut_ids=zeros(num_rows, dtype=torch.int32),
            results=zeros(num_requests, limits.max_num_draft_tokens + 2, dtype=torch.int32),
            logprobs=zeros(num_rows, 1 + MAX_LOGPROBS, dtype=torch.float32),
            logprob_ids=zeros(num_rows, MAX_LOGPROBS, dtype=torch.int32),
        )

    def first(self, num_requests: int, num_tokens: int, num_logit_rows: int) -> "RoundInputs":
        """Views for a smaller round: every size reads and writes the same memory."""
        return RoundInputs(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            cu_seqlens_q=self.cu_seqlens_q[: num_requests + 1],
            seq_lens=self.seq_lens[:num_requests],
            block_tables=self.block_tables[:num_requests],
            logit_starts=self.logit_starts[: num_requests + 1],
            logit_rows=self.logit_rows[:num_logit_rows],
            temperatures=self.temperatures[:num_logit_rows],
            keys=self.keys[:num_logit_rows],
            indices=self.indices[:num_logit_rows],
            choices=self.choices[:num_logit_rows],
            slots=self.slots[:num_requests],
            requests=self.requests[:num_logit_rows],
            asks=self.asks[:num_logit_rows],
            cut_values=self.cut_values[:num_logit_rows],
            cut_ids=self.cut_ids[:num_logit_rows],
            results=self.results[:num_requests],
            logprobs=self.logprobs[:num_logit_rows],
            logprob_ids=self.logprob_ids[:num_logit_rows],
        )
