"""Heads that draft token by token: eagle, eagle3, mtp."""

from collections.abc import Sequence

import torch

from specwire.engine.batch import RaggedBatch, Segment
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftSampling
from specwire.engine.heads.head import SequentialHead
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig

from .drawn import Drawn
from .head_forward import HeadRow, HeadSampler


class SequentialForward:
    """A pass for the rows that were committed, whose last one gives the first draft, then a pass for each further draft.

    Args:
        head: the model.
        config: shape of its layers.
        kv_cache: of its layers, where and in the dtype that it is computed in.
        num_candidates: see `HeadSampler`.
    """

    shift = 1
    num_repeated = 1

    def __init__(self, head: SequentialHead, config: ModelConfig, kv_cache: KVCache, num_candidates: int = 0) -> None:
        self.counts = PassCounts()
        self._head = head
        self._kv_cache = kv_cache
        self._group = config.num_heads // config.num_kv_heads
        self._sampler = HeadSampler(head.vocabulary, num_candidates)
        self._device, self._dtype = kv_cache.layers[0].device, kv_cache.layers[0].dtype

    def num_lookahead(self, num_drafts: int) -> int:
        """See `HeadForward.num_lookahead`: the last draft is never fed."""
        return num_drafts - 1

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `HeadForward.open`."""
        self._sampler.open(slot, sampling)

    @torch.inference_mode()
    def compute(self, rows: Sequence[HeadRow]) -> None:
        """See `HeadForward.compute`."""
        self._first_pass(rows)

    @torch.inference_mode()
    def draft(self, rows: Sequence[HeadRow]) -> list[DraftTokens]:
        """See `HeadForward.draft`. Of all rows that still want one, a draft a pass."""
        drawn = Drawn(len(rows))
        live, residual = list(range(len(rows))), self._first_pass(rows)
        for position in range(max(row.num_drafts for row in rows)):
            if position:
                wanted = [i for i, index in enumerate(live) if rows[index].num_drafts > position]
                live = [live[i] for i in wanted]
                features = self._head.carry(residual if len(wanted) == len(residual) else residual[torch.tensor(wanted, device=self._device)])
                segments = [Segment([drawn.token_ids[i][-1]], rows[i].end + position - 1, rows[i].block_table) for i in live]
                residual = self._pass(segments, features)
            # Row i predicts the token at i + 2.
            samples = self._sampler.draw(
                self._sampler.logits(self._head.output(residual)),
                [rows[index].slot for index in live],
                [rows[index].end + 1 + position for index in live],
            )
            drawn.add(live, samples)
        return drawn.drafts()

    def _first_pass(self, rows: Sequence[HeadRow]) -> torch.Tensor:
        features = torch.cat([row.features.to(self._device) for row in rows])
        return self._pass([Segment(row.token_ids, row.start, row.block_table) for row in rows], features)

    def _pass(self, segments: Sequence[Segment], features: torch.Tensor) -> torch.Tensor:
        """The residual stream [S, hidden_size] of each segment's last row."""
        batch = RaggedBatch.from_segments(segments, self._kv_cache.block_size, self._group, self._device, self._dtype)
        self.counts.add_eager(batch.num_tokens)
        residual = self._head.forward(batch, features, self._kv_cache)
        if batch.num_tokens == len(segments):
            return residual
        return residual[torch.tensor(batch.row_starts[1:], device=self._device) - 1]
