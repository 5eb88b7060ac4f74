"""Heads that draft a block in one pass: dflash, dspark."""

from collections.abc import Sequence

import torch

from specwire.engine.batch import RaggedBatch, Segment
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftSampling
from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.markov import Candidates
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig

from .drawn import Drawn
from .head_forward import HeadRow, HeadSampler


class BlockForward:
    """A pass over whole blocks, however few drafts are wanted: what is drafted must not depend on that.

    Args:
        head: the model.
        config: shape of its layers.
        kv_cache: of its layers, where and in the dtype that it is computed in.
        num_candidates: see `HeadSampler`.
    """

    shift = 0
    num_repeated = 0

    def __init__(self, head: BlockHead, config: ModelConfig, kv_cache: KVCache, num_candidates: int = 0) -> None:
        self.counts = PassCounts()
        self._head = head
        self._kv_cache = kv_cache
        self._group = config.num_heads // config.num_kv_heads
        self._sampler = HeadSampler(head.vocabulary, num_candidates)
        self._device, self._dtype = kv_cache.layers[0].device, kv_cache.layers[0].dtype

    def num_lookahead(self, num_drafts: int) -> int:
        """See `HeadForward.num_lookahead`."""
        return self._head.num_queries

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `HeadForward.open`."""
        self._sampler.open(slot, sampling)

    @torch.inference_mode()
    def compute(self, rows: Sequence[HeadRow]) -> None:
        """See `HeadForward.compute`."""
        new = [row for row in rows if row.token_ids]
        if new:
            batch = self._batch([Segment(row.token_ids, row.start, row.block_table) for row in new], attends=False)
            self._head.write_context(batch, torch.cat([row.features.to(self._device) for row in new]), self._kv_cache)

    @torch.inference_mode()
    def draft(self, rows: Sequence[HeadRow]) -> list[DraftTokens]:
        """See `HeadForward.draft`."""
        self.compute(rows)
        head, num_drafts = self._head, max(row.num_drafts for row in rows)
        masks = [head.mask_token_id] * (head.num_queries - 1)
        batch = self._batch([Segment([row.last_token, *masks], row.end, row.block_table) for row in rows], attends=True)
        hidden = head.forward(batch, self._kv_cache).view(len(rows), head.num_queries, -1)
        hidden = hidden[:, head.first_draft : head.first_draft + num_drafts]  # [R, num_drafts, hidden_size]
        logits = self._sampler.logits(hidden.flatten(0, 1)).view(len(rows), num_drafts, -1)
        drafts = self._draw(rows, hidden, logits)
        return [drafted.first(row.num_drafts) for row, drafted in zip(rows, drafts, strict=True)]

    def _draw(self, rows: Sequence[HeadRow], hidden: torch.Tensor, logits: torch.Tensor) -> list[DraftTokens]:
        """num_drafts of each row, one draft after another: each may depend on the one before it."""
        head, slots = self._head, [row.slot for row in rows]
        num_drafts = logits.shape[1]
        previous = torch.tensor([row.last_token for row in rows], device=self._device)
        every = Candidates(None, logits.flatten(0, 1)) if head.markov is None else head.markov.candidates(logits.flatten(0, 1))
        columns = None if every.columns is None else every.columns.unflatten(0, (-1, num_drafts))
        values = every.logits.unflatten(0, (-1, num_drafts))
        drawn = Drawn(len(rows))
        for position in range(num_drafts):
            candidates = Candidates(None if columns is None else columns[:, position], values[:, position])
            if head.markov is not None:
                candidates = candidates._replace(logits=head.markov.biased(candidates, previous))
            samples = self._sampler.draw(candidates.logits, slots, [row.end + 1 + position for row in rows], candidates.columns)
            scores = None if head.confidence is None else head.confidence(hidden[:, position], previous, position).clamp(max=1.0).tolist()
            drawn.add(range(len(rows)), samples, scores)
            previous = samples.token_ids
        return drawn.drafts()

    def _batch(self, segments: Sequence[Segment], *, attends: bool) -> RaggedBatch:
        batch = RaggedBatch.from_segments(
            segments, self._kv_cache.block_size, self._group, self._device, self._dtype, plans_attention=attends, is_causal=self._head.is_causal
        )
        self.counts.add_eager(batch.num_tokens)
        return batch
