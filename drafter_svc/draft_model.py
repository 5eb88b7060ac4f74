"""A small model drafts token by token, with a paged KV cache of its own and the target's noise.

Only the temperature of a request's sampling parameters is applied: filters, penalties and masks are the target's, which corrects
what drafts do not know of.
"""

import dataclasses
import logging
from collections.abc import Sequence

from specwire.engine.block_manager import BlockManager
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.kv_cache import BLOCK_SIZE
from specwire.engine.models.decoder import NUMERICS_VERSION, Decoder
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, RowStatus, ServiceDescription
from specwire.sampling_params import check_choice

from .forward import DraftForward
from .method import Ask, Drafts

logger = logging.getLogger(__name__)

_MAX_INLINE_TOKENS = 16
"""Tokens without KV that a sequence may have and still be drafted for at once; with more it waits for `catch_up`."""
_MIN_SHARE = 16
"""Least tokens of a background chunk that one sequence gets."""


@dataclasses.dataclass(slots=True)
class _Sequence:
    """Committed tokens, and the drafts whose KV follows that of the committed tokens."""

    token_ids: list[int]
    fed_drafts: list[int] = dataclasses.field(default_factory=list)


class DraftModel:
    """Drafts with a model of the Llama family. Draft j (from 1) of a sequence of n tokens uses the noise of index n - 1 + j.

    A draft's score is its probability under the draft model at the request's temperature (at 1 if greedy).

    Args:
        model: the draft model.
        forward: runs it.
        num_blocks: of forward's KV.
        max_num_drafts: most drafts at once (K).
        max_num_seqs: most sequences; their numbers are below it.
        max_model_len: no sequence is drafted past this many tokens; None = the model's context.
        greedy: draft by argmax whatever the request's temperature.
        feeds_drafts: the KV that forward writes behind the text is that of its drafts, so that it may be kept once they are committed.
        vocab_size: of the target, if its ids are not the model's own; forward knows how to read them.
    """

    features = None

    def __init__(
        self,
        model: Decoder,
        forward: DraftForward,
        *,
        num_blocks: int,
        max_num_drafts: int,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        greedy: bool = False,
        feeds_drafts: bool = True,
        vocab_size: int | None = None,
        model_id: str = "",
        tokenizer_fingerprint: str = "",
    ) -> None:
        config = model.config
        self._max_model_len = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
        self._max_num_drafts = max_num_drafts
        self._greedy = greedy
        self._feeds_drafts = feeds_drafts
        self._vocab_size = vocab_size or config.vocab_size
        self._forward = forward
        self._blocks = BlockManager(num_blocks)
        self._max_inline = max(_MAX_INLINE_TOKENS, max_num_drafts + 1)
        self._sequences: dict[int, _Sequence] = {}
        self._behind: dict[int, None] = {}  # an ordered set: sequences that wait for `catch_up`, next one first
        self._description = ServiceDescription(
            model_id=model_id,
            instance_id="",
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            max_num_draft_tokens=max_num_drafts,
            max_num_seqs=max_num_seqs,
            weights_hash=model.weights_hash,
            tokenizer_fingerprint=tokenizer_fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            numerics_version=str(NUMERICS_VERSION),
            device=str(model.device),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            method="draft_model",
            eos_token_ids=config.eos_token_ids if vocab_size is None else (),
        )

    @property
    def description(self) -> ServiceDescription:
        return self._description

    @property
    def counts(self) -> PassCounts:
        return self._forward.counts

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    def check_integrity(self) -> None:
        """Asserts that blocks and sequences agree. For tests."""
        self._blocks.check_integrity()
        assert self._blocks.num_sequences == len(self._sequences), f"{self._blocks.num_sequences} own blocks, {len(self._sequences)} are open"
        assert self._behind.keys() <= self._sequences.keys(), f"behind: {list(self._behind)}, open: {list(self._sequences)}"

    def open(self, seq_id: int, request: DraftOpen) -> None:
        self._check_ids(request.token_ids)
        check_choice(request.choice)
        params = request.sampling
        temperature = 0.0 if self._greedy or params.is_greedy else params.temperature
        self._sequences[seq_id] = _Sequence(list(request.token_ids))
        self._forward.open(seq_id, DraftSampling(temperature, request.noise_key, request.choice))
        self._blocks.open(seq_id, request.token_ids, request.tenant_cache_key)
        self._note_if_behind(seq_id)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._check_ids(token_ids)
        sequence = self._sequences[seq_id]
        num_kept = _common_prefix(sequence.fed_drafts, token_ids)
        self._blocks.finalize(seq_id, token_ids[:num_kept])
        self._blocks.set_computed(seq_id, self._blocks.num_final_tokens(seq_id))
        sequence.fed_drafts = []
        sequence.token_ids.extend(token_ids)
        self._note_if_behind(seq_id)

    def close(self, seq_id: int) -> None:
        del self._sequences[seq_id]
        self._behind.pop(seq_id, None)
        self._blocks.close(seq_id)

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        """One forward pass a draft position over all sequences that get that many; the first also computes what was committed since."""
        plans = [self._plan(ask) for ask in asks]
        drafts = iter(self._draft([plan for plan in plans if isinstance(plan, DraftRow)]))
        return [next(drafts) if isinstance(plan, DraftRow) else plan for plan in plans]

    def catch_up(self, budget: int) -> int:
        """One chunk, shared among the sequences that are behind. Those without blocks wait until some are free."""
        ready = [seq_id for seq_id in self._behind if self._blocks.reserve(seq_id, self._num_tokens(seq_id))]
        share = max(_MIN_SHARE, budget // len(ready)) if ready else 0
        rows: list[DraftRow] = []
        for seq_id in ready:
            known, start = self._sequences[seq_id].token_ids, self._blocks.num_final_tokens(seq_id)
            # The last token is computed when drafts are asked for: they need its logits.
            missing = len(known) - 1 - start
            num_tokens = min(missing, share, budget)
            if num_tokens <= 0:
                break
            budget -= num_tokens
            rows.append(DraftRow(seq_id, start, known[start : start + num_tokens], self._blocks.block_table(seq_id)))
            del self._behind[seq_id]
            if num_tokens < missing:
                self._behind[seq_id] = None
        if rows:
            self._forward.compute(rows)
        for row in rows:
            self._blocks.finalize(row.slot, row.token_ids)
        return sum([len(row.token_ids) for row in rows])

    def _num_tokens(self, seq_id: int) -> int:
        return len(self._sequences[seq_id].token_ids)

    def _num_missing(self, seq_id: int) -> int:
        return self._num_tokens(seq_id) - self._blocks.num_final_tokens(seq_id)

    def _note_if_behind(self, seq_id: int) -> None:
        if self._num_missing(seq_id) > self._max_inline and self._num_tokens(seq_id) < self._max_model_len:
            self._behind.setdefault(seq_id)
        elif self._num_tokens(seq_id) >= self._max_model_len:
            self._behind.pop(seq_id, None)

    def _plan(self, ask: Ask) -> DraftRow | Drafts:
        """What is computed for a sequence now, with blocks for it, or the answer where it gets no drafts."""
        seq_id, known = ask.seq_id, self._sequences[ask.seq_id].token_ids
        num_tokens = len(known)
        num_drafts = min(ask.num_drafts, self._max_num_drafts, self._max_model_len - num_tokens)
        if num_drafts <= 0 or num_tokens == 0:
            return Drafts(RowStatus.OK)
        num_missing = num_tokens - self._blocks.num_final_tokens(seq_id)
        if num_missing > self._max_inline:
            starved = self._blocks.num_missing_blocks(seq_id, num_tokens) > self._blocks.num_free_blocks
            return Drafts(RowStatus.OUT_OF_BLOCKS if starved else RowStatus.CATCHING_UP)
        # The last draft is never fed, so that it needs no KV.
        if not self._blocks.reserve(seq_id, num_tokens + num_drafts - 1):
            return Drafts(RowStatus.OUT_OF_BLOCKS)
        # Where all tokens have KV the last one is computed again: drafts need what follows it.
        start = num_tokens - max(num_missing, 1)
        return DraftRow(seq_id, start, known[start:], self._blocks.block_table(seq_id), num_drafts)

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafts]:
        results = self._forward.launch(rows)
        # A device is busy with them meanwhile; whatever reads their KV comes after them.
        for row in rows:
            num_tokens = row.start_position + len(row.token_ids)
            self._blocks.finalize(row.slot, row.token_ids[self._blocks.num_final_tokens(row.slot) - row.start_position :])
            self._blocks.set_computed(row.slot, num_tokens + row.num_drafts - 1)
            self._behind.pop(row.slot, None)
        drafts = results()
        for row, (token_ids, _) in zip(rows, drafts, strict=True):
            self._sequences[row.slot].fed_drafts = token_ids[:-1] if self._feeds_drafts else []
        return [Drafts(RowStatus.OK, *drafted) for drafted in drafts]

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidArgumentError(
                f"token id {wrong} is not in the draft model's vocabulary, 0 to {self._vocab_size - 1}; the sequence is decoded without drafts"
            )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
