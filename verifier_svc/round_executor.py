"""Rounds on the round runner: launched one behind the other, read when they have arrived. The GPU's way."""

from collections.abc import Sequence

import torch

from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.results import Round, samples_in_kernel
from specwire.engine.graphs.runner import RoundCounts, RoundRunner
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.sampling.slot import SlotSampling

from .plan import UNREAD, Segment
from .slots import Slot

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its class takes."""


class RoundExecutor:
    """See `Executor`. At most as many rounds may be unread as the runner was made for.

    Args:
        runner: captured, if it has graphs.
        kv_cache: the runner's.
        max_num_seqs: slots of the runner.
    """

    def __init__(self, runner: RoundRunner, kv_cache: KVCache, max_num_seqs: int) -> None:
        self.kv_cache = kv_cache
        self.sampling_device = torch.device("cpu")
        self._runner = runner
        self._free_places = list(range(max_num_seqs - 1, -1, -1))
        self._places: dict[int, int] = {}  # the runner's slot of each of ours, whose numbers a coordinator chooses

    @property
    def counts(self) -> RoundCounts:
        return self._runner.counts

    def open(self, slot: Slot) -> None:
        """See `Executor.open`."""
        assert slot.sampling is not None, f"slot {slot.slot} has no sampling state: {slot.error}"
        place = self._places[slot.slot] = self._free_places.pop()
        self._runner.open(place, slot.sampling)

    def close(self, slot: Slot) -> None:
        """See `Executor.close`."""
        self._free_places.append(self._places.pop(slot.slot))

    def samples_on_host(self, sampling: SlotSampling) -> bool:
        """See `Executor.samples_on_host`."""
        return not samples_in_kernel(sampling)

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> Round:
        """See `Executor.launch`."""
        places, block_table = self._places, blocks.block_table
        rows = []
        for segment in segments:
            slot, start_position, _, drafts, samples, from_device, _ = segment
            number, sampling = slot.slot, slot.sampling
            assert sampling is not None, f"slot {number} has no sampling state: {slot.error}"
            token_ids = UNREAD if from_device else segment.token_ids
            rows.append(_new(RoundRow, (places[number], start_position, token_ids, len(drafts), block_table(number), sampling, samples, from_device)))
        return self._runner.launch(rows)
