"""What a launched round emits, once it has arrived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from specwire.engine.graphs.tensors import DEAD
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.sampling.segments import SegmentTokens
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import TokenLogprobs


def samples_in_kernel(sampling: SlotSampling) -> bool:
    """Whether a slot's rows are sampled on the device, whatever they ask for: not with bad words of several tokens."""
    return not sampling.phrases


@dataclass(frozen=True, slots=True)
class Download:
    """Where the results of one round arrive, page-locked; the fields are those of `RoundInputs`."""

    results: torch.Tensor  # [N, K + 2] int32
    logprobs: torch.Tensor  # [L, 1 + MAX_LOGPROBS] float32, only copied for rounds with a row that asks
    logprob_ids: torch.Tensor  # [L, MAX_LOGPROBS] int32


_new_tokens = partial(tuple.__new__, SegmentTokens)
"""`SegmentTokens._make`, four times as fast."""


class Round:
    """A round on its way. Its buffers are used again after `results` was called.

    Args:
        rows: of the round.
        download: its copy is the last thing in the stream.
        reporting: rows whose log-probabilities arrive too -> (their first row of logits, how many of the likeliest tokens).
        outside: results of rows that no kernel sampled, by row.
        is_plain: whether all rows sample, on the device, and report nothing but tokens.
        device: where it runs.
    """

    def __init__(
        self,
        rows: Sequence[RoundRow],
        download: Download,
        reporting: Mapping[int, tuple[int, int]],
        outside: Mapping[int, SegmentTokens],
        is_plain: bool,
        device: torch.device,
    ) -> None:
        self.is_read = False
        self._rows, self._download, self._reporting, self._outside = rows, download, reporting, outside
        self._is_plain = is_plain
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
        self.is_read = True  # also where the device fails: later rounds are to end with its own error
        self.wait()
        numbers = self._download.results[: len(self._rows)].numpy()
        rows = self._rows
        if self._is_plain and not numbers[:, 0].any():
            # All in C: the event loop of a full batch waits for this.
            return list(map(_new_tokens, zip(repeat(0), zip(numbers[:, 1].tolist()), repeat(False), repeat(None), repeat(None))))
        by_row = numbers[:, : 2 + max(row.num_drafts for row in rows)].tolist()
        if self._is_plain and numbers[:, 0].min() >= 0:
            return [_new_tokens((of_row[0], tuple(of_row[1 : 2 + of_row[0]]), False, None, None)) for of_row in by_row]
        return [self._result(index, row, of_row) for index, (row, of_row) in enumerate(zip(rows, by_row, strict=True))]

    def _result(self, index: int, row: RoundRow, numbers: Sequence[int]) -> SegmentTokens:
        first = numbers[0]
        if first == DEAD:
            return SegmentTokens(0, (), is_bad=True, logprobs=None, margins=None)
        if index in self._outside:
            return self._outside[index]
        is_bad = first < 0
        num_accepted = -1 - first if is_bad else first
        num_emitted = num_accepted + (row.samples and not is_bad)
        logprobs = self._logprobs(index, num_emitted) if index in self._reporting else None
        return SegmentTokens(num_accepted, tuple(numbers[1 : 1 + num_emitted]), is_bad, logprobs, margins=None)

    def _logprobs(self, index: int, num_emitted: int) -> list[TokenLogprobs]:
        first, num_top = self._reporting[index]
        values = self._download.logprobs[first : first + num_emitted, : 1 + num_top].tolist()
        token_ids = self._download.logprob_ids[first : first + num_emitted, :num_top].tolist()
        return [TokenLogprobs(sampled, list(zip(ids, top, strict=True))) for (sampled, *top), ids in zip(values, token_ids, strict=True)]
