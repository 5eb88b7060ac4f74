"""EAGLE-3 on CPUs that multiply weights of few bits fast: all drafts of a call in one piece of compiled code."""

from collections.abc import Sequence

from specwire.engine.counts import PassCounts
from specwire.engine.cpu.drafts import TiledDrafts
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.heads.eagle3 import Eagle3Head
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig

from .head_forward import HeadRow


class TiledHeadForward:
    """See `HeadForward`, and `SequentialForward`, which drafts the same to rounding.

    Args:
        head: with tiled weights.
        config: shape of its layers.
        kv_cache: of its layers, bfloat16.
        max_num_drafts: of a sequence.
    """

    shift = 1
    num_repeated = 1

    def __init__(self, head: Eagle3Head, config: ModelConfig, kv_cache: KVCache, max_num_drafts: int) -> None:
        self.counts = PassCounts()
        self._kv_cache = kv_cache  # whose memory is written
        self._drafts = TiledDrafts(config, head.weights, head.vocabulary, kv_cache.layers, max_num_drafts)
        self._sampling: dict[int, DraftSampling] = {}

    def num_lookahead(self, num_drafts: int) -> int:
        """See `HeadForward.num_lookahead`: the last draft is never fed."""
        return num_drafts - 1

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `HeadForward.open`."""
        self._sampling[slot] = sampling

    def compute(self, rows: Sequence[HeadRow]) -> None:
        """See `HeadForward.compute`."""
        self._drafts.run([_row(row)._replace(num_drafts=0) for row in rows])
        self._count(rows, 1)

    def draft(self, rows: Sequence[HeadRow]) -> list[DraftTokens]:
        """See `HeadForward.draft`."""
        drafts = self._drafts.run([_row(row) for row in rows], [self._sampling[row.slot] for row in rows])
        self._count(rows, max(row.num_drafts for row in rows))
        return drafts

    def _count(self, rows: Sequence[HeadRow], num_passes: int) -> None:
        num_tokens = sum(len(row.token_ids) + max(0, row.num_drafts - 1) for row in rows)
        self.counts.num_eager_passes += num_passes
        self.counts.num_tokens += num_tokens
        self.counts.num_padded_tokens += num_tokens


def _row(row: HeadRow) -> DraftRow:
    return DraftRow(row.slot, row.start, row.token_ids, row.block_table, row.num_drafts, row.features, row.start)
