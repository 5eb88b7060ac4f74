"""Runs a draft model on a device: one upload and one small download a call; every draft but the first follows from a token that no host has seen.

Nothing that knows of sequences, scheduling or blocks' owners may be added here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from specwire.engine.counts import PassCounts
from specwire.engine.graphs.backends import Backend, choose_backend
from specwire.engine.graphs.capture import capture_graphs, eager_sizes
from specwire.engine.graphs.draft_forward import DraftForward, DraftPasses, SteppedPasses
from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling, DraftUploads
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.proposals import RowProposals

MakePasses = Callable[[Backend, torch.Tensor, torch.Tensor, DraftRows, DraftInputs, int], DraftPasses]
"""(kernels, upload, block tables, rows, following inputs, most tokens of a pass) -> the passes of a draft head."""


class DraftTokens(NamedTuple):
    """Drafts of one row, the probability of each under the draft model, and what they were drawn from, if with private noise."""

    token_ids: list[int]
    probs: list[float]
    proposals: RowProposals | None = None

    def first(self, num_drafts: int) -> "DraftTokens":
        """The leading drafts."""
        proposals = None if self.proposals is None else self.proposals.first(num_drafts)
        return DraftTokens(self.token_ids[:num_drafts], self.probs[:num_drafts], proposals)


@dataclass(frozen=True, slots=True)
class HeadModel:
    """A head that is drafted with like a model: its layers' shape, and how its passes are made."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    make_passes: MakePasses


@dataclass(slots=True)
class _Pass:
    """A pass of one padded size."""

    run: Callable[[], None]
    graph: torch.cuda.CUDAGraph | None = None  # None where there are no graphs, or before the capture


class DraftRunner:
    """One draft model or head on one device, one call at a time. Not thread-safe: one thread owns it.

    A call of `launch` is a first pass over the committed tokens that have no KV yet, which draws draft 1 of each row, then a pass for each
    further draft over the rows that want it; of a head that drafts blocks the first pass draws all. First passes are padded to token counts, the
    others to row counts; on CUDA each size is a graph.

    Args:
        model: the draft model or head.
        kv_cache: on the same device.
        max_num_seqs: slots.
        max_num_drafts: most drafts of a row (K).
        max_model_len: most tokens of a sequence.
        max_chunk: most tokens of one pass of `compute`; more than fit are divided.
        backend: None = the device's.
        use_graphs: False runs the same kernels one by one, to look for faults. Off a CUDA device there are no graphs.
        joins_passes: all passes of a call over one row that wants all drafts are one graph.
    """

    def __init__(
        self,
        model: Decoder | HeadModel,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_drafts: int,
        max_model_len: int,
        max_chunk: int,
        backend: Backend | None = None,
        use_graphs: bool = True,
        joins_passes: bool = False,
    ) -> None:
        device = model.device
        limits = RoundLimits(max_num_seqs, max_num_drafts, max(max_chunk, max_num_seqs * (max_num_drafts + 1)), max_model_len)
        self.counts = PassCounts()
        self._max_num_seqs, self._max_chunk, self._max_query_len = max_num_seqs, limits.max_num_batched_tokens, limits.max_query_len
        self._use_graphs = use_graphs and device.type == "cuda"
        backend = backend or choose_backend(model.config, device, model.dtype, kv_cache.block_size)

        max_blocks = -(-max_model_len // kv_cache.block_size)
        self._uploads = DraftUploads(max_num_seqs, max_blocks, self._max_chunk, device)
        tables, row_tables = torch.zeros((2, max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self._inputs = DraftInputs.allocate(max_num_seqs, self._max_chunk, row_tables)
        following = DraftInputs.allocate(max_num_seqs, max_num_seqs, row_tables)
        self._rows = DraftRows.allocate(max_num_seqs, max_num_drafts, device)
        self._download = torch.zeros(self._rows.results.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._finished = torch.cuda.Event() if device.type == "cuda" else None

        forward: DraftPasses
        if isinstance(model, HeadModel):
            forward = model.make_passes(backend, self._uploads.on_device, tables, self._rows, following, self._max_chunk)
        else:
            forward = DraftForward(model, kv_cache, backend, self._uploads.on_device, tables, self._rows, following)
        self._forward = forward
        self._chunk_attention = backend.attention(max_num_seqs, self._max_chunk, self._max_chunk)
        self._first: dict[int, _Pass] = {}
        for size in limits.graph_sizes():
            num_rows = min(size, max_num_seqs)
            attention = backend.attention(num_rows, size, min(size, self._max_query_len))
            self._first[size] = _Pass(partial(forward.first, self._inputs.first(num_rows, size), attention))
        # Below max_num_seqs both have the same sizes: a first pass has the rows of all passes after it, and leaves nothing old in them.
        self._steps: dict[int, _Pass] = {}
        if isinstance(forward, SteppedPasses):
            for size in replace(limits, max_num_draft_tokens=0).graph_sizes():
                self._steps[size] = _Pass(partial(forward.step, following.first(size, size), backend.attention(size, size, 1)))
        self._max_num_drafts = max_num_drafts
        self._joined: dict[int, _Pass] = {}
        if joins_passes and self._steps:
            for size in (size for size in self._first if size <= self._max_query_len):
                self._joined[size] = _Pass(partial(_run_all, [self._first[size].run, *[self._steps[1].run] * (max_num_drafts - 1)]))

    @property
    def num_graphs(self) -> int:
        """How many `capture` makes."""
        return len(self._first) + len(self._steps) + len(self._joined) if self._use_graphs else 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs an empty pass of each kind in its largest size, kernel by kernel: no pass takes more memory."""
        self._compute_empty(self._max_chunk)
        for passes in filter(None, (self._first, self._steps)):
            passes[max(passes)].run()

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles all kernels and, on CUDA, captures a graph of each size into one memory pool.

        Args:
            on_progress: called with (graphs captured, graphs in all) after each one.
        """
        for num_tokens in eager_sizes(self._max_chunk):
            self._compute_empty(num_tokens)
        if not self._use_graphs:
            return
        passes = [made for kind in (self._first, self._steps, self._joined) for _, made in sorted(kind.items(), reverse=True)]
        for made, graph in zip(passes, capture_graphs([made.run for made in passes], on_progress), strict=True):
            made.graph = graph

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """A new sequence in a slot, from the next call on."""
        self._uploads.open(slot, sampling)

    @torch.inference_mode()
    def compute(self, rows: Sequence[DraftRow]) -> None:
        """Writes KV of the rows' tokens, kernel by kernel; returns when it is there."""
        for chunk in _divide(rows, self._max_chunk):
            num_tokens = self._send(chunk)
            self._count(num_tokens, num_tokens)
            self.counts.num_eager_passes += 1
            self._forward.compute(self._inputs.first(self._max_num_seqs, num_tokens), self._chunk_attention)
            self._record()
            self._wait()

    @torch.inference_mode()
    def launch(self, rows: Sequence[DraftRow]) -> Callable[[], list[DraftTokens]]:
        """Starts a call. Returns a function that waits for the drafts of each row, in their order; it is to be called before the next call."""
        nums_drafts = [row.num_drafts for row in rows]
        order: Sequence[int] = range(len(rows))
        if nums_drafts.count(nums_drafts[0] if rows else 0) < len(rows):
            order = sorted(order, key=lambda index: -nums_drafts[index])
            rows, nums_drafts = [rows[index] for index in order], [nums_drafts[index] for index in order]
        ordered = self._shorten(rows)
        if not ordered:
            return list
        assert ordered[-1].num_drafts > 0, f"no drafts wanted: {ordered[-1]}"
        num_tokens, num_live = self._send(ordered), len(ordered)
        if self._joined and num_live == 1 and ordered[0].num_drafts == self._max_num_drafts:
            self._run_joined(num_tokens)
        else:
            self._run(self._first, num_tokens)
            for position in range(1, ordered[0].num_drafts if self._steps else 1):
                while ordered[num_live - 1].num_drafts <= position:
                    num_live -= 1
                self._run(self._steps, num_live)
        self._download[: len(rows)].copy_(self._rows.results[: len(rows)], non_blocking=True)
        self._record()
        return partial(self._results, order, nums_drafts)

    def _results(self, order: Sequence[int], nums_drafts: Sequence[int]) -> list[DraftTokens]:
        """Waits for a call, whose i-th row on the device is row order[i]."""
        self._wait()
        numbers = self._download[: len(order)].numpy()
        token_ids, probs = numbers[:, 0].tolist(), numbers[:, 1].view(np.float32).tolist()
        drafts = [DraftTokens([], [])] * len(order)
        if nums_drafts[-1] == len(token_ids[0]):  # all have all; nothing to reorder
            return list(map(tuple.__new__, repeat(DraftTokens), zip(token_ids, probs, repeat(None), strict=False)))
        for index, num_drafts, tokens, prob in zip(order, nums_drafts, token_ids, probs, strict=True):
            drafts[index] = DraftTokens(tokens[:num_drafts], prob[:num_drafts])
        return drafts

    def _shorten(self, rows: Sequence[DraftRow]) -> Sequence[DraftRow]:
        """Computes all but the last token of rows that are longer than any graph takes; returns what is left."""
        long = [row for row in rows if len(row.token_ids) > self._max_query_len]
        if not long:
            return rows
        self.compute([row._replace(token_ids=row.token_ids[:-1]) for row in long])
        last = {row.slot: row._replace(start_position=row.start_position + len(row.token_ids) - 1, token_ids=row.token_ids[-1:]) for row in long}
        return [last.get(row.slot, row) for row in rows]

    def _send(self, rows: Sequence[DraftRow]) -> int:
        """Uploads a call; returns its number of tokens."""
        self._wait()
        self._uploads.send(rows)
        self._forward.send(rows)
        return sum([len(row.token_ids) for row in rows])

    def _run_joined(self, num_tokens: int) -> None:
        """All passes of one row that wants all drafts."""
        self._run(self._joined, num_tokens)
        for _ in range(self._max_num_drafts - 1):
            self._count(1, 1)
            self.counts.num_graph_passes += 1

    def _compute_empty(self, num_tokens: int) -> None:
        """An empty chunk, kernel by kernel."""
        self._uploads.send(())
        self._forward.compute(self._inputs.first(self._max_num_seqs, num_tokens), self._chunk_attention)

    def _run(self, passes: dict[int, _Pass], count: int) -> None:
        """The smallest size that holds `count`."""
        size = next(size for size in passes if size >= count)
        self._count(count, size)
        self.counts.num_graph_passes += 1
        made = passes[size]
        if made.graph is not None:
            made.graph.replay()
        else:
            assert not self._use_graphs, "graphs are not captured: call capture first"
            made.run()

    def _count(self, num_tokens: int, num_padded_tokens: int) -> None:
        self.counts.num_tokens += num_tokens
        self.counts.num_padded_tokens += num_padded_tokens

    def _record(self) -> None:
        if self._finished is not None:
            self._finished.record()

    def _wait(self) -> None:
        """For what was recorded last: the buffers are used again."""
        if self._finished is not None:
            self._finished.synchronize()


def _run_all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _divide(rows: Sequence[DraftRow], most: int) -> Iterator[list[DraftRow]]:
    """Parts of at most `most` tokens; a row that crosses the border is in both."""
    part: list[DraftRow] = []
    room = most
    for row in rows:
        begin = 0
        while begin < len(row.token_ids):
            token_ids = row.token_ids[begin : begin + room]
            part.append(row._replace(start_position=row.start_position + begin, token_ids=token_ids))
            begin, room = begin + len(token_ids), room - len(token_ids)
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part
