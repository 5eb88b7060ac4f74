"""Heads on a GPU."""

from collections.abc import Callable, Sequence
from functools import partial

from specwire.engine.counts import PassCounts
from specwire.engine.graphs.backends import Backend
from specwire.engine.graphs.block_passes import BlockPasses
from specwire.engine.graphs.draft_runner import DraftRunner, DraftTokens, HeadModel, MakePasses
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.graphs.head_forward import HeadPasses
from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.load import Head
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig

from .head_forward import HeadRow


class DeviceForward:
    """As `SequentialForward` or `BlockForward`, on the device from one upload to one download; on CUDA in captured graphs.

    Args:
        head: the model.
        config: shape of its layers.
        width: numbers of a feature.
        kv_cache: of its layers, where and in the dtype that it is computed in.
        max_num_seqs: slots.
        max_num_drafts: most drafts of a row (K).
        max_model_len: most tokens of a sequence.
        max_chunk: most rows of one pass of `compute`; more than fit are divided.
        backend: None = the device's.
        use_graphs: False runs the same kernels one by one, to look for faults.
    """

    shift = 1
    """Also of heads that draft blocks: their KV needs no token, but the last row's token is then the block's anchor."""
    num_repeated = 1

    def __init__(
        self,
        head: Head,
        config: ModelConfig,
        width: int,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_drafts: int,
        max_model_len: int,
        max_chunk: int,
        backend: Backend | None = None,
        use_graphs: bool = True,
    ) -> None:
        device, dtype = kv_cache.layers[0].device, kv_cache.layers[0].dtype
        passes: MakePasses
        if isinstance(head, BlockHead):
            passes, self._block = partial(BlockPasses, head, width, kv_cache), head.num_queries
        else:
            passes, self._block = partial(HeadPasses, head, width, kv_cache), 0
        self._runner = DraftRunner(
            HeadModel(config, dtype, device, passes),
            kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_drafts=max_num_drafts,
            max_model_len=max_model_len + self._block,
            max_chunk=max_chunk,
            backend=backend,
            use_graphs=use_graphs,
        )

    @property
    def counts(self) -> PassCounts:
        return self._runner.counts

    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """To be called before the first pass; see `DraftRunner.capture`."""
        self._runner.capture(on_progress)

    def num_lookahead(self, num_drafts: int) -> int:
        """See `HeadForward.num_lookahead`: a whole block, or all drafts but the last, which is never fed."""
        return self._block or num_drafts - 1

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `HeadForward.open`."""
        self._runner.open(slot, sampling)

    def compute(self, rows: Sequence[HeadRow]) -> None:
        """See `HeadForward.compute`."""
        self._runner.compute([_device_row(row) for row in rows])

    def draft(self, rows: Sequence[HeadRow]) -> list[DraftTokens]:
        """See `HeadForward.draft`."""
        return self._runner.launch([_device_row(row) for row in rows])()


def _device_row(row: HeadRow) -> DraftRow:
    return DraftRow(row.slot, row.start, row.token_ids, row.block_table, row.num_drafts, row.features, row.start)
