"""Rounds on a model runner: computed where they are launched, so nothing is ever on its way. The CPU's way."""

from collections.abc import Sequence

import torch

from specwire.engine import batch
from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.runner import RoundCounts
from specwire.engine.kv_cache import KVCache
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.segments import SegmentRows, SegmentTokens, sample_segments
from specwire.engine.sampling.slot import SlotSampling

from .plan import Segment
from .slots import Slot


class ModelExecutor:
    """See `Executor`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.counts = RoundCounts()

    @property
    def kv_cache(self) -> KVCache:
        return self._runner.kv_cache

    @property
    def sampling_device(self) -> torch.device:
        return self._runner.model.device

    def open(self, slot: Slot) -> None:
        """See `Executor.open`."""

    def close(self, slot: Slot) -> None:
        """See `Executor.close`."""

    def samples_on_host(self, sampling: SlotSampling) -> bool:
        """Always."""
        return True

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> "ComputedRound":
        """Computes the round."""
        outputs = run_segments(self._runner, blocks, segments)
        num_tokens = sum(segment.num_tokens for segment in segments)
        self.counts.num_eager_rounds += 1
        self.counts.num_tokens += num_tokens
        self.counts.num_padded_tokens += num_tokens
        return ComputedRound(outputs)


class ComputedRound:
    """See `PendingRound`."""

    def __init__(self, outputs: list[SegmentTokens]) -> None:
        self._outputs = outputs

    def is_done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Returns at once."""

    def results(self) -> list[SegmentTokens]:
        """See `PendingRound.results`."""
        return self._outputs


def run_segments(runner: ModelRunner, blocks: BlockManager, segments: Sequence[Segment]) -> list[SegmentTokens]:
    """Computes all segments in one ragged batch; their blocks are reserved. One output a segment, in order: without tokens for a prefill
    chunk that ends early; is_bad also where the model's hidden states are NaN or infinite."""
    ragged = runner.batch([batch.Segment(s.token_ids, s.start_position, blocks.block_table(s.slot.slot)) for s in segments])
    hidden = runner.forward(ragged)
    ends = ragged.row_starts[1:]
    sampling = [index for index, segment in enumerate(segments) if segment.samples]
    filling = [index for index, segment in enumerate(segments) if not segment.samples]
    outputs = _sample(runner, hidden, [segments[i] for i in sampling], [ends[i] for i in sampling])
    outputs += _check_filled(hidden, [ends[i] for i in filling])
    by_index = dict(zip([*sampling, *filling], outputs, strict=True))
    return [by_index[index] for index in range(len(segments))]


def _sample(runner: ModelRunner, hidden: torch.Tensor, segments: Sequence[Segment], ends: Sequence[int]) -> list[SegmentTokens]:
    """Samples the last 1 + num_drafts rows of each segment, which end before row `end` of hidden [T, hidden_size]."""
    if not segments:
        return []
    rows = [row for segment, end in zip(segments, ends, strict=True) for row in range(end - 1 - len(segment.draft_tokens), end)]
    logits = runner.logits(hidden, rows)  # [R, vocab_size]
    return sample_segments(logits, [_segment_rows(segment) for segment in segments])


def _segment_rows(segment: Segment) -> SegmentRows:
    sampling = segment.slot.sampling
    assert sampling is not None, f"slot {segment.slot.slot} has no sampling state: {segment.slot.error}"
    return SegmentRows(sampling, segment.start_position + segment.num_known, segment.draft_tokens, proposals=segment.proposals)


def _check_filled(hidden: torch.Tensor, ends: Sequence[int]) -> list[SegmentTokens]:
    """Segments without output: bad KV anywhere in the sequence shows in the last row, which attends to all of it."""
    if not ends:
        return []
    last = hidden[torch.tensor(ends, device=hidden.device) - 1]  # [n, hidden_size]
    return [SegmentTokens(0, (), is_bad=not good, logprobs=None, margins=None) for good in last.isfinite().all(dim=1).tolist()]
