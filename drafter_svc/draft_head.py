"""Drafts of a head: what it knows of each sequence, in a paged KV cache of its own, built from the target's features alone.

KV that a head makes while it drafts comes from its own guesses; it is written over once the features of what was accepted are there.
"""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from specwire.engine.block_manager import BlockManager
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_upload import DraftSampling
from specwire.engine.heads.calibration import LogisticCalibration
from specwire.messages import DraftOpen, RowStatus, ServiceDescription
from specwire.sampling_params import check_choice

from .backlog import Backlog, divide
from .head_forward import HeadForward, HeadRow
from .method import MEASUREMENT_TENANT, Ask, Drafts, FeatureNotes, check_ids


class FeatureSpan(NamedTuple):
    """Features of consecutive positions of one sequence."""

    seq_id: int
    first: int
    num_positions: int


class Features(FeatureNotes, Protocol):
    """Where the target's features of sequences come from; sequences are the method's, by its numbers."""

    def num_ready(self, seq_id: int, num_tokens: int) -> int:
        """Leading positions of the num_tokens committed tokens whose features can be read now: at most num_tokens - 1."""
        ...

    def read(self, spans: Sequence[FeatureSpan]) -> list[torch.Tensor | None]:
        """Features [num_positions, width] of each span, on any device; None where they could not be had after all."""
        ...

    def close(self, seq_id: int) -> None:
        """Forgets a sequence, if it was known."""
        ...


@dataclasses.dataclass(slots=True)
class _Sequence:
    token_ids: list[int]
    is_made_up: bool  # for a measurement: there is no target, and any features do
    temperature: float  # of the request, whatever the drafts' own; 0 = greedy


class _Plan(NamedTuple):
    """num_rows rows of a sequence from the first on, then drafts."""

    seq_id: int
    first: int
    num_rows: int
    num_drafts: int = 0


class DraftHead:
    """Drafts with a head. Draft j (from 1) of a sequence of n tokens uses the noise of index n - 1 + j and needs the features of its first
    n - 1 tokens.

    Args:
        forward: runs the head; its KV has the blocks.
        features: of the target.
        width: numbers of a feature.
        description: of the service; num_blocks, max_num_draft_tokens, max_model_len and vocab_size are the limits that hold here.
        greedy: draft by argmax whatever the request's temperature.
        sharpness: multiplies the logits before noise, as for `DraftModel`.
        calibration: makes scores of what forward says; None = they are that.
    """

    def __init__(
        self,
        forward: HeadForward,
        features: Features,
        width: int,
        description: ServiceDescription,
        *,
        greedy: bool = False,
        sharpness: float = 1.0,
        calibration: LogisticCalibration | None = None,
    ) -> None:
        self._forward = forward
        self._features = features
        self._width = width
        self._description = description
        self._greedy = greedy
        self._sharpness = sharpness
        self._calibration = calibration
        self._blocks = BlockManager(description.num_blocks, description.block_size)
        self._sequences: dict[int, _Sequence] = {}
        self._behind = Backlog(description.max_num_draft_tokens + 1)

    @property
    def description(self) -> ServiceDescription:
        return self._description

    @property
    def counts(self) -> PassCounts:
        return self._forward.counts

    @property
    def features(self) -> FeatureNotes:
        return self._features

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    def check_integrity(self) -> None:
        """Asserts that blocks and sequences agree. For tests."""
        self._blocks.check_integrity()
        assert self._blocks.num_sequences == len(self._sequences), f"{self._blocks.num_sequences} own blocks, {len(self._sequences)} are open"
        assert set(self._behind) <= self._sequences.keys(), f"behind: {list(self._behind)}, open: {list(self._sequences)}"

    def open(self, seq_id: int, request: DraftOpen) -> None:
        check_ids(request.token_ids, self._description.vocab_size, "head")
        check_choice(request.choice)
        params, shift = request.sampling, self._forward.shift
        asked = 0.0 if params.is_greedy else params.temperature
        self._sequences[seq_id] = _Sequence(list(request.token_ids), request.tenant_cache_key == MEASUREMENT_TENANT, asked)
        temperature = 0.0 if self._greedy or params.is_greedy else params.temperature / self._sharpness
        self._forward.open(seq_id, DraftSampling(temperature, request.noise_key, request.choice))
        # A row is made of the tokens up to `shift` behind its position: those before the first row's own are part of the key.
        key = b"".join(token_id.to_bytes(4, "little") for token_id in request.token_ids[:shift])
        if len(request.token_ids) < shift:
            key = secrets.token_bytes(16)
        self._blocks.open(seq_id, request.token_ids[shift:], request.tenant_cache_key + key)
        self._note_if_behind(seq_id)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        check_ids(token_ids, self._description.vocab_size, "head")
        self._sequences[seq_id].token_ids.extend(token_ids)
        self._blocks.set_computed(seq_id, self._blocks.num_final_tokens(seq_id))
        self._note_if_behind(seq_id)

    def close(self, seq_id: int) -> None:
        del self._sequences[seq_id]
        self._behind.discard(seq_id)
        self._blocks.close(seq_id)
        self._features.close(seq_id)

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        """The rows that were committed since, and the drafts behind them, for all sequences at once."""
        plans, num_inline = list[_Plan | Drafts](), 0
        for ask in asks:
            plan = self._plan(ask, num_inline)
            plans.append(plan)
            if isinstance(plan, _Plan) and plan.num_rows > self._behind.max_step:
                num_inline += plan.num_rows
        rows = iter(self._rows([plan for plan in plans if isinstance(plan, _Plan)]))
        ready = [next(rows) if isinstance(plan, _Plan) else plan for plan in plans]
        drafts = iter(self._draft([row for row in ready if isinstance(row, HeadRow)]))
        return [next(drafts) if isinstance(row, HeadRow) else Drafts(RowStatus.CATCHING_UP) if row is None else row for row in ready]

    def catch_up(self, budget: int) -> int:
        """One chunk, for the sequences that are behind and whose features are there. Those without blocks wait until some are free."""
        missing = {seq_id: self._num_computable(seq_id) for seq_id in self._behind}
        missing = {seq_id: count for seq_id, count in missing.items() if count > 0 and self._blocks.reserve(seq_id, self._num_rows(seq_id))}
        plans = [_Plan(seq_id, self._blocks.num_final_tokens(seq_id), count) for seq_id, count in divide(missing, budget).items()]
        rows = [row for row in self._rows(plans) if row is not None]
        if rows:
            self._forward.compute(rows)
        for row in rows:
            self._blocks.finalize(row.slot, row.token_ids)
            if self._num_missing(row.slot) <= self._behind.max_step:
                self._behind.discard(row.slot)
        return sum(len(row.token_ids) for row in rows)

    def _num_rows(self, seq_id: int) -> int:
        """Rows of KV that the committed tokens have in the end."""
        return max(0, len(self._sequences[seq_id].token_ids) - 1)

    def _num_missing(self, seq_id: int) -> int:
        return self._num_rows(seq_id) - self._blocks.num_final_tokens(seq_id)

    def _num_computable(self, seq_id: int) -> int:
        """Missing rows whose features are there."""
        return self._num_ready(seq_id) - self._blocks.num_final_tokens(seq_id)

    def _num_ready(self, seq_id: int) -> int:
        sequence, num_rows = self._sequences[seq_id], self._num_rows(seq_id)
        return num_rows if sequence.is_made_up else min(num_rows, self._features.num_ready(seq_id, len(sequence.token_ids)))

    def _note_if_behind(self, seq_id: int) -> None:
        if self._num_rows(seq_id) >= self._description.max_model_len:
            self._behind.discard(seq_id)
        else:
            self._behind.note(seq_id, self._num_missing(seq_id))

    def _plan(self, ask: Ask, num_inline: int) -> _Plan | Drafts:
        """What is computed for a sequence now, with blocks for it, or the answer where it gets no drafts.

        Args:
            num_inline: see `Backlog.is_inline`.
        """
        seq_id, num_tokens = ask.seq_id, len(self._sequences[ask.seq_id].token_ids)
        limits = self._description
        num_drafts = min(ask.num_drafts, limits.max_num_draft_tokens, limits.max_model_len - num_tokens)
        if num_drafts <= 0 or num_tokens < 2:
            return Drafts(RowStatus.OK)
        num_rows, num_missing = self._num_rows(seq_id), self._num_missing(seq_id)
        if self._num_ready(seq_id) < num_rows:
            return Drafts(RowStatus.CATCHING_UP)
        if not self._behind.is_inline(num_missing, num_inline):
            starved = self._blocks.num_missing_blocks(seq_id, num_rows) > self._blocks.num_free_blocks
            return Drafts(RowStatus.OUT_OF_BLOCKS if starved else RowStatus.CATCHING_UP)
        if not self._blocks.reserve(seq_id, num_rows + self._forward.num_lookahead(num_drafts)):
            return Drafts(RowStatus.OUT_OF_BLOCKS)
        count = max(num_missing, self._forward.num_repeated)
        return _Plan(seq_id, num_rows - count, count, num_drafts)

    def _rows(self, plans: Sequence[_Plan]) -> list[HeadRow | None]:
        """The plans with their features; None where those could not be had."""
        spans = [
            FeatureSpan(plan.seq_id, plan.first, plan.num_rows) for plan in plans if plan.num_rows and not self._sequences[plan.seq_id].is_made_up
        ]
        read = iter(self._features.read(spans) if spans else ())
        rows: list[HeadRow | None] = []
        for plan in plans:
            sequence = self._sequences[plan.seq_id]
            is_read = plan.num_rows and not sequence.is_made_up
            features = next(read) if is_read else torch.zeros(plan.num_rows, self._width)
            if features is None:
                rows.append(None)
                continue
            begin = plan.first + self._forward.shift
            tokens = sequence.token_ids[begin : begin + plan.num_rows]
            table = self._blocks.block_table(plan.seq_id)
            rows.append(HeadRow(plan.seq_id, plan.first, tokens, features, table, plan.num_drafts, sequence.token_ids[-1]))
        return rows

    def _draft(self, rows: Sequence[HeadRow]) -> list[Drafts]:
        if not rows:
            return []
        drafts = self._forward.draft(rows)
        for row in rows:
            num_new = row.start + len(row.token_ids) - self._blocks.num_final_tokens(row.slot)
            self._blocks.finalize(row.slot, row.token_ids[len(row.token_ids) - num_new :])
            self._behind.discard(row.slot)
        scores = [drafted.probs for drafted in drafts]
        if self._calibration is not None:
            scores = self._calibration(scores, [self._sequences[row.slot].temperature for row in rows])
        return [Drafts(RowStatus.OK, drafted.token_ids, row, drafted.proposals) for drafted, row in zip(drafts, scores, strict=True)]
