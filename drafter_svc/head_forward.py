"""Runs a head over the rows of sequences: what all kinds of heads have in common."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftSampling
from specwire.engine.heads.vocabulary import Vocabulary
from specwire.engine.sampling.draft import DraftSamples, sample_draft, sample_draft_among
from specwire.engine.sampling.proposal import propose_drafts


class HeadRow(NamedTuple):
    """Rows of one sequence whose features are known, and how many drafts are to follow them.

    Args:
        slot: opened before, and of no other row of the call.
        start: the first one's number; KV of all rows before is computed.
        token_ids: their tokens.
        features: [len(token_ids), width].
        block_table: the sequence's blocks in order, covering the rows and `num_lookahead` more.
        num_drafts: 0 = only KV is wanted; else the rows are the sequence's last ones.
        last_token: of the sequence.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    features: torch.Tensor
    block_table: Sequence[int]
    num_drafts: int
    last_token: int

    @property
    def end(self) -> int:
        """Rows of the sequence up to the last of these."""
        return self.start + len(self.token_ids)


class HeadForward(Protocol):
    """Forward passes over sequences in slots, whose blocks the caller owns."""

    shift: int
    """How far behind its position the last token is that a row is made of."""
    num_repeated: int
    """Rows that must be among those computed with drafts, though their KV is there."""

    @property
    def counts(self) -> PassCounts: ...

    def num_lookahead(self, num_drafts: int) -> int:
        """Rows of KV behind those of the committed tokens that so many drafts write."""
        ...

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """A new sequence in a slot."""
        ...

    def compute(self, rows: Sequence[HeadRow]) -> None:
        """Writes KV of rows."""
        ...

    def draft(self, rows: Sequence[HeadRow]) -> list[DraftTokens]:
        """Writes KV of rows and drafts behind them."""
        ...


class HeadSampler:
    """Draws drafts in the target's ids.

    Args:
        vocabulary: of the head.
        num_candidates: likeliest tokens that drafts are drawn from, with private noise; 0 = all, with the target's noise.
    """

    def __init__(self, vocabulary: Vocabulary, num_candidates: int = 0) -> None:
        self._vocabulary = vocabulary
        self._num_candidates = num_candidates
        self._sampling: dict[int, DraftSampling] = {}

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """A new sequence in a slot."""
        self._sampling[slot] = sampling

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 [R, draft_vocab_size]."""
        return self._vocabulary.head(hidden)

    def draw(self, logits: torch.Tensor, slots: Sequence[int], indices: Sequence[int], columns: torch.Tensor | None = None) -> DraftSamples:
        """One token for each row of logits [R, m], each of a slot and with the noise of an index.

        Args:
            columns: [R, m], which of the head's outputs they are; None = all.
        """
        sampling, vocabulary = [self._sampling[slot] for slot in slots], self._vocabulary
        temperatures, keys, choices = [one.temperature for one in sampling], [one.key for one in sampling], [one.choice for one in sampling]
        token_ids = columns
        if vocabulary.target_ids is not None:
            token_ids = vocabulary.target_ids if columns is None else vocabulary.target_ids[columns]
        if self._num_candidates:
            return propose_drafts(
                logits, self._num_candidates, temperatures=temperatures, keys=keys, indices=indices, choices=choices, target_ids=token_ids
            )
        if token_ids is not None:
            return sample_draft_among(token_ids.expand_as(logits), logits, temperatures=temperatures, keys=keys, indices=indices, choices=choices)
        return sample_draft(logits, temperatures=temperatures, keys=keys, indices=indices, choices=choices)
