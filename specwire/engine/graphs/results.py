"""What a launched round emits, once it has arrived."""

from collections.abc import Mapping, Sequence

import torch

from specwire.engine.graphs.tensors import DEAD
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.sampling.segments import SegmentTokens
from specwire.engine.sampling.slot import SlotSampling


def samples_in_kernel(sampling: SlotSampling, first_index: int) -> bool:
    """Whether rows from token index `first_index` on need only a temperature and noise: no filter, no processor, nothing reported but tokens."""
    params = sampling.params
    has_filter = not params.is_greedy and (params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < sampling.vocab_size)
    return not (has_filter or params.logprobs is not None or sampling.conditional_rates is not None or sampling.processes_at(first_index))


class Round:
    """A round on its way. Its buffers are used again after `results` was called.

    Args:
        rows: of the round.
        download: page-locked, [at least R, K + 2]; its copy is the last thing in the stream.
        outside: results of rows that no kernel sampled, by row.
        device: where it runs.
    """

    def __init__(self, rows: Sequence[RoundRow], download: torch.Tensor, outside: Mapping[int, SegmentTokens], device: torch.device) -> None:
        self.is_read = False
        self._rows, self._download, self._outside = rows, download, outside
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def is_done(self) -> bool:
        """Whether `results` has nothing to wait for."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> None:
        """Returns once the round has arrived. Any thread may call it."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def results(self) -> list[SegmentTokens]:
        """Waits for the round, and for nothing behind it. One output a row, in order: without tokens where the row does not sample."""
        assert not self.is_read, "a round is read once: its buffers are another's by now"
        self.wait()
        self.is_read = True
        numbers = self._download[: len(self._rows)].tolist()
        return [self._result(index, row, numbers[index]) for index, row in enumerate(self._rows)]

    def _result(self, index: int, row: RoundRow, numbers: Sequence[int]) -> SegmentTokens:
        first = numbers[0]
        if first == DEAD:
            return SegmentTokens(0, (), is_bad=True, logprobs=None, margins=None)
        if index in self._outside:
            return self._outside[index]
        is_bad = first < 0
        num_accepted = -1 - first if is_bad else first
        num_emitted = num_accepted + (row.samples and not is_bad)
        return SegmentTokens(num_accepted, tuple(numbers[1 : 1 + num_emitted]), is_bad, logprobs=None, margins=None)
