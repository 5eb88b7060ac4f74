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
from specwire.messages import DraftOpen, RowStatus, ServiceDescription
from specwire.sampling_params import check_choice

from .backlog import Backlog, divide
from .forward import DraftForward
from .method import Ask, Drafts, check_ids

logger = logging.getLogger(__name__)

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""


@dataclasses.dataclass(slots=True)
class _Sequence:
    """Committed tokens, how many of the first ones have KV, the drafts whose KV follows, and the blocks, whose owner hears of full ones."""

    token_ids: list[int]
    num_computed: int
    block_table: list[int]
    fed_drafts: list[int] = dataclasses.field(default_factory=list)


class DraftModel:
    """Drafts with a model of the Llama family. Draft j (from 1) of a sequence of n tokens uses the noise of index n - 1 + j.

    A draft's score is its probability under the draft model at the temperature that it is drawn at (at 1 if greedy).

    Args:
        model: the draft model.
        forward: runs it.
        num_blocks: of forward's KV.
        max_num_drafts: most drafts at once (K).
        max_num_seqs: most sequences; their numbers are below it.
        max_model_len: no sequence is drafted past this many tokens; None = the model's context.
        greedy: draft by argmax whatever the request's temperature.
        sharpness: multiplies the logits before noise: s * z + T * g is greatest where z + T / s * g is, so that drafts are drawn at T / s.
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
        sharpness: float = 1.0,
        feeds_drafts: bool = True,
        vocab_size: int | None = None,
        model_id: str = "",
        tokenizer_fingerprint: str = "",
    ) -> None:
        config = model.config
        self._max_model_len = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
        self._max_num_drafts = max_num_drafts
        self._greedy = greedy
        self._sharpness = sharpness
        self._feeds_drafts = feeds_drafts
        self._vocab_size = vocab_size or config.vocab_size
        self._forward = forward
        self._blocks = BlockManager(num_blocks)
        self._max_step = max_num_drafts + 1
        self._sequences: dict[int, _Sequence] = {}
        self._behind = Backlog(self._max_step)
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
        assert set(self._behind) <= self._sequences.keys(), f"behind: {list(self._behind)}, open: {list(self._sequences)}"

    def open(self, seq_id: int, request: DraftOpen) -> None:
        check_ids(request.token_ids, self._vocab_size, "draft model")
        check_choice(request.choice)
        params = request.sampling
        temperature = 0.0 if self._greedy or params.is_greedy else params.temperature / self._sharpness
        self._forward.open(seq_id, DraftSampling(temperature, request.noise_key, request.choice))
        num_cached = self._blocks.open(seq_id, request.token_ids, request.tenant_cache_key)
        self._sequences[seq_id] = _Sequence(list(request.token_ids), num_cached, self._blocks.block_table(seq_id))
        self._note_if_behind(seq_id)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        check_ids(token_ids, self._vocab_size, "draft model")
        sequence = self._sequences[seq_id]
        if sequence.fed_drafts:
            sequence.num_computed += _common_prefix(sequence.fed_drafts, token_ids)
            sequence.fed_drafts = []
        known = sequence.token_ids
        known += token_ids
        if len(known) - sequence.num_computed > self._max_step or len(known) >= self._max_model_len:
            self._note_if_behind(seq_id)

    def close(self, seq_id: int) -> None:
        self._finalize(seq_id, self._sequences.pop(seq_id))
        self._behind.discard(seq_id)
        self._blocks.close(seq_id)

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        """One forward pass a draft position over all sequences that get that many; the first also computes what was committed since."""
        plans, num_inline = list[DraftRow | Drafts](), 0
        for ask in asks:
            plan = self._plan(ask, num_inline)
            plans.append(plan)
            if isinstance(plan, DraftRow) and len(plan.token_ids) > self._max_step:
                num_inline += len(plan.token_ids)
        rows = [plan for plan in plans if isinstance(plan, DraftRow)]
        drafts = self._draft(rows) if rows else []
        if len(rows) == len(plans):
            return drafts
        rest = iter(drafts)
        return [next(rest) if isinstance(plan, DraftRow) else plan for plan in plans]

    def catch_up(self, budget: int) -> int:
        """One chunk, for the sequences that are behind. Those without blocks wait until some are free."""
        ready = [seq_id for seq_id in self._behind if self._blocks.reserve(seq_id, len(self._sequences[seq_id].token_ids))]
        # The last token is computed when drafts are asked for: they need its logits.
        missing = {seq_id: self._num_missing(seq_id) - 1 for seq_id in ready}
        shares = divide(missing, budget)
        if not shares:
            return 0
        rows = []
        for seq_id, num_tokens in shares.items():
            sequence = self._sequences[seq_id]
            start = sequence.num_computed
            rows.append(DraftRow(seq_id, start, sequence.token_ids[start : start + num_tokens], sequence.block_table))
        self._forward.compute(rows)
        for row in rows:
            sequence = self._sequences[row.slot]
            sequence.num_computed += len(row.token_ids)
            self._finalize(row.slot, sequence)
            if shares[row.slot] == missing[row.slot]:
                self._behind.discard(row.slot)
        return sum(shares.values())

    def _num_missing(self, seq_id: int) -> int:
        sequence = self._sequences[seq_id]
        return len(sequence.token_ids) - sequence.num_computed

    def _finalize(self, seq_id: int, sequence: _Sequence) -> None:
        """Full blocks become findable for others."""
        num_known = self._blocks.num_final_tokens(seq_id)
        self._blocks.finalize(seq_id, sequence.token_ids[num_known : sequence.num_computed])

    def _note_if_behind(self, seq_id: int) -> None:
        sequence = self._sequences[seq_id]
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self._max_model_len:
            self._behind.discard(seq_id)
        else:
            self._behind.note(seq_id, num_tokens - sequence.num_computed)

    def _plan(self, ask: Ask, num_inline: int) -> DraftRow | Drafts:
        """What is computed for a sequence now, with blocks for it, or the answer where it gets no drafts.

        Args:
            num_inline: see `Backlog.is_inline`.
        """
        seq_id, num_drafts = ask
        sequence = self._sequences[seq_id]
        known = sequence.token_ids
        num_tokens = len(known)
        num_drafts = min(num_drafts, self._max_num_drafts, self._max_model_len - num_tokens)
        if num_drafts <= 0 or num_tokens == 0:
            return Drafts(RowStatus.OK)
        num_missing = num_tokens - sequence.num_computed
        if num_missing > self._max_step and not self._behind.is_inline(num_missing, num_inline):
            starved = self._blocks.num_missing_blocks(seq_id, num_tokens) > self._blocks.num_free_blocks
            return Drafts(RowStatus.OUT_OF_BLOCKS if starved else RowStatus.CATCHING_UP)
        # The last draft is never fed, so that it needs no KV.
        num_positions = num_tokens + num_drafts - 1
        if num_positions > len(sequence.block_table) * BLOCK_SIZE and not self._blocks.reserve(seq_id, num_positions):
            return Drafts(RowStatus.OUT_OF_BLOCKS)
        # Where all tokens have KV the last one is computed again: drafts need what follows it.
        start = num_tokens - (num_missing or 1)
        return _new(DraftRow, (seq_id, start, known[start:], sequence.block_table, num_drafts, None, 0))

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafts]:
        results = self._forward.launch(rows)
        # A device is busy with them meanwhile; whatever reads their KV comes after them.
        for row in rows:
            seq_id = row.slot
            sequence = self._sequences[seq_id]
            before, now = sequence.num_computed, len(sequence.token_ids)
            sequence.num_computed = now
            if before // BLOCK_SIZE != now // BLOCK_SIZE:
                self._finalize(seq_id, sequence)
            if self._behind:
                self._behind.discard(seq_id)
        drafts = results()
        if self._feeds_drafts:
            for row, drafted in zip(rows, drafts, strict=True):
                self._sequences[row.slot].fed_drafts = drafted.token_ids[:-1]
        return [_new(Drafts, (RowStatus.OK, *drafted)) for drafted in drafts]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
