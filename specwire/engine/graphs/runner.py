"""Runs rounds: packs the upload, replays the graph of the round's size, and hands out its results when they have arrived.

Nothing that knows of sequences, scheduling or blocks' owners may be added here, and nothing that waits for the device in `launch` but the
sampling of rows that the host samples.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from specwire.engine.graphs.backends import Attention, Backend, choose_backend
from specwire.engine.graphs.capture import capture_graphs, eager_sizes
from specwire.engine.graphs.forward import RoundForward
from specwire.engine.graphs.results import Download, Round
from specwire.engine.graphs.slot_tables import write_slot_tables
from specwire.engine.graphs.tensors import RoundInputs, RoundLimits, SlotState, num_bytes
from specwire.engine.graphs.upload import RoundRow, SentRound, Uploads
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.sampling.segments import SegmentRows, SegmentTokens, sample_segments
from specwire.engine.sampling.slot import SlotSampling


@dataclass(slots=True)
class RoundCounts:
    """Since the start."""

    num_graph_rounds: int = 0  # on CUDA; rounds of a graph's size elsewhere
    num_eager_rounds: int = 0  # with a row longer than num_draft_tokens + 1, or more tokens than the largest graph
    num_padded_tokens: int = 0  # through the model, with padding
    num_tokens: int = 0
    num_rows_sampled_outside: int = 0  # each made its round wait for the device


@dataclass(slots=True)
class _Size:
    """Rounds of up to len(inputs.token_ids) tokens."""

    inputs: RoundInputs
    attention: Attention
    graph: torch.cuda.CUDAGraph | None = None  # None where there are no graphs, or before the capture


class RoundRunner:
    """One model on one device, with up to `num_in_flight` rounds launched and not read. Not thread-safe: one thread owns it.

    Args:
        model: the decoder.
        kv_cache: on the same device.
        limits: of every round.
        num_in_flight: rounds that may be launched before the first one's results are read (W).
        backend: None = the device's.
        use_graphs: False runs the same kernels one by one, to look for faults. Off a CUDA device there are no graphs.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        limits: RoundLimits,
        *,
        num_in_flight: int = 2,
        backend: Backend | None = None,
        use_graphs: bool = True,
    ) -> None:
        device = self._device = model.device
        self.counts = RoundCounts()
        self._limits = limits
        self._use_graphs = use_graphs and device.type == "cuda"
        self._backend = backend or choose_backend(model.config, device, model.dtype, kv_cache.block_size)
        self._state = SlotState.allocate(limits, kv_cache.block_size, device, model.config.vocab_size)
        max_blocks = self._state.block_tables.shape[1]
        self._uploads = Uploads(limits, max_blocks, num_in_flight, device)
        self._inputs = RoundInputs.allocate(limits, max_blocks, device)
        self._downloads = [self._make_download() for _ in range(num_in_flight)]
        self._rounds: list[Round | None] = [None] * num_in_flight
        self._next_buffer = 0
        self._forward = RoundForward(model, kv_cache, self._backend, self._state, self._uploads.on_device, limits.max_graph_tokens)
        self._eager_attention = self._backend.attention(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_num_batched_tokens)
        self._size_list = limits.graph_sizes()
        self._sizes = {size: self._make_size(size) for size in self._size_list}

    @property
    def graph_sizes(self) -> list[int]:
        """Token counts that short rows are padded to, rising."""
        return list(self._size_list)

    def memory(self) -> dict[str, int]:
        """Bytes on the device by what they hold; without graphs and the kernels' scratch."""
        tables = self._state.num_table_bytes
        return {
            "logits": self._forward.logits.nbytes,
            "slots' tables of biases, masks and counts": tables,
            "slots and inputs": num_bytes(self._state) - tables + num_bytes(self._inputs) + self._uploads.on_device.nbytes,
        }

    @property
    def num_graphs(self) -> int:
        """How many `capture` makes."""
        return len(self._sizes) if self._use_graphs else 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs an empty round of the most tokens and one of the largest graph, kernel by kernel: no round takes more memory."""
        self._run_empty(self._limits.max_num_batched_tokens)
        largest = self._sizes[self._size_list[-1]]
        self._forward.run(largest.inputs, largest.attention)

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles all kernels and, on CUDA, captures a graph of each size, largest first into one memory pool.

        Args:
            on_progress: called with (graphs captured, graphs in all) after each one.
        """
        for num_tokens in eager_sizes(self._limits.max_num_batched_tokens):
            self._run_empty(num_tokens)
        if not self._use_graphs:
            return
        sizes = [self._sizes[size] for size in reversed(self._size_list)]
        graphs = capture_graphs([partial(self._forward.run, size.inputs, size.attention) for size in sizes], on_progress)
        for size, graph in zip(sizes, graphs, strict=True):
            size.graph = graph

    def reset_counts(self) -> None:
        """Begins to count anew: what was run to measure is not to be seen in what is served."""
        self.counts = RoundCounts()

    def open(self, slot: int, sampling: SlotSampling) -> None:
        """A new sequence in a slot, from the next round on; rounds launched before still see the old one."""
        flags = self._uploads.open(slot, sampling)
        write_slot_tables(self._state, slot, sampling, flags)

    @torch.inference_mode()
    def launch(self, rows: Sequence[RoundRow]) -> Round:
        """Starts a round; its results come from the round that is returned. The round launched num_in_flight rounds before must be read."""
        assert rows, "a round without rows"
        buffer = self._next_buffer
        self._next_buffer = (buffer + 1) % len(self._rounds)
        before = self._rounds[buffer]
        assert before is None or before.is_read, f"more than {len(self._rounds)} rounds in flight"
        sent = self._uploads.send(rows, buffer)
        self._run(sent)
        starts = list(accumulate((1 + row.num_drafts for row in rows), initial=0)) if sent.on_host or sent.reporting else []
        outside = self._sample_outside(rows, sent.on_host, starts) if sent.on_host else {}
        download, inputs = self._downloads[buffer], self._inputs
        download.results[: len(rows)].copy_(inputs.results[: len(rows)], non_blocking=True)
        if sent.reporting:
            download.logprobs[: starts[-1]].copy_(inputs.logprobs[: starts[-1]], non_blocking=True)
            download.logprob_ids[: starts[-1]].copy_(inputs.logprob_ids[: starts[-1]], non_blocking=True)
        reporting = {index: (starts[index], _num_top(rows[index].sampling)) for index in sent.reporting}
        is_plain = sent.num_sampling == len(rows) and not sent.on_host and not sent.reporting
        started = self._rounds[buffer] = Round(rows, download, reporting, outside, is_plain, self._device)
        return started

    def _run_empty(self, num_tokens: int) -> None:
        """An empty round, eagerly."""
        self._uploads.send((), 0)
        inputs = self._inputs.first(self._limits.max_num_seqs, num_tokens, min(num_tokens, self._limits.max_num_seqs))
        self._forward.run(inputs, self._eager_attention)

    def _run(self, sent: SentRound) -> None:
        """Runs the uploaded round in the smallest graph that holds it, or eagerly."""
        num_tokens = sent.num_tokens
        assert num_tokens <= len(self._inputs.token_ids), f"{num_tokens} tokens in a round, {len(self._inputs.token_ids)} fit"
        self.counts.num_tokens += num_tokens
        if sent.longest > self._limits.max_query_len or num_tokens > self._limits.max_graph_tokens:
            self.counts.num_eager_rounds += 1
            self.counts.num_padded_tokens += num_tokens
            self._forward.run(self._inputs.first(self._limits.max_num_seqs, num_tokens, sent.num_logit_rows), self._eager_attention)
            return
        size = self._size_list[bisect_left(self._size_list, num_tokens)]
        self.counts.num_graph_rounds += 1
        self.counts.num_padded_tokens += size
        made = self._sizes[size]
        if made.graph is not None:
            made.graph.replay()
        else:
            assert not self._use_graphs, "graphs are not captured: call capture first"
            self._forward.run(made.inputs, made.attention)

    def _sample_outside(self, rows: Sequence[RoundRow], chosen: Sequence[int], starts: Sequence[int]) -> dict[int, SegmentTokens]:
        """Samples rows that no kernel does, from the kept logits, and puts their last tokens into the state. Waits."""
        self.counts.num_rows_sampled_outside += len(chosen)
        logit_rows = torch.tensor([r for i in chosen for r in range(starts[i], starts[i + 1])], device=self._device)
        segments = [
            SegmentRows(row.sampling, row.first_index, row.token_ids[len(row.token_ids) - row.num_drafts :]) for row in map(rows.__getitem__, chosen)
        ]
        outputs = sample_segments(self._forward.logits[logit_rows].to(rows[chosen[0]].sampling.device), segments)
        slots = torch.tensor([rows[i].slot for i in chosen], device=self._device)
        last_tokens = torch.tensor([-1 if out.is_bad else out.token_ids[-1] for out in outputs], dtype=torch.int32, device=self._device)
        # A slot that was dead before the round stays dead: its logits are of nothing.
        dead = self._inputs.seq_lens[torch.tensor(chosen, device=self._device)] == 0
        self._state.last_tokens[slots] = last_tokens.masked_fill_(dead, -1)
        return dict(zip(chosen, outputs, strict=True))

    def _make_download(self) -> Download:
        sources = (self._inputs.results, self._inputs.logprobs, self._inputs.logprob_ids)
        return Download(*(torch.zeros(source.shape, dtype=source.dtype, pin_memory=self._device.type == "cuda") for source in sources))

    def _make_size(self, num_tokens: int) -> _Size:
        num_requests = min(num_tokens, self._limits.max_num_seqs)
        inputs = self._inputs.first(num_requests, num_tokens, num_tokens)
        return _Size(inputs, self._backend.attention(num_requests, num_tokens, min(num_tokens, self._limits.max_query_len)))


def _num_top(sampling: SlotSampling) -> int:
    """How many of the likeliest tokens a slot reports."""
    return min(sampling.params.logprobs or 0, sampling.vocab_size)
