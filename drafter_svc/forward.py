"""Runs the draft model: pass by pass from the host, or on the device from one upload to one download."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from specwire.engine.batch import Segment
from specwire.engine.counts import PassCounts
from specwire.engine.graphs.draft_runner import DraftRunner, DraftTokens
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.draft import DraftSamples, sample_draft
from specwire.engine.sampling.proposal import propose_drafts

from .drawn import Drawn
from .vocab_mapping import VocabMapping


class DraftForward(Protocol):
    """Forward passes over sequences in slots, whose blocks the caller owns."""

    @property
    def counts(self) -> PassCounts: ...

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """A new sequence in a slot."""
        ...

    def compute(self, rows: Sequence[DraftRow]) -> None:
        """Writes KV of the rows' tokens."""
        ...

    def launch(self, rows: Sequence[DraftRow]) -> Callable[[], list[DraftTokens]]:
        """Starts to write KV of the rows' tokens and of all drafts but the last; rows want at least one.

        Returns a function that waits for the drafts of each row, in order.
        """
        ...


def make_forward(
    model: Decoder,
    kv_cache: KVCache,
    *,
    max_num_seqs: int,
    max_num_drafts: int,
    max_model_len: int,
    max_chunk: int,
    use_graphs: bool,
) -> DraftForward:
    """What suits the model's device; see `DraftRunner` for the sizes. A `DraftRunner` is to be captured before its first call."""
    if model.device.type != "cuda":
        return EagerForward(ModelRunner(model, kv_cache))
    return DraftRunner(
        model,
        kv_cache,
        max_num_seqs=max_num_seqs,
        max_num_drafts=max_num_drafts,
        max_model_len=max_model_len,
        max_chunk=max_chunk,
        use_graphs=use_graphs,
    )


class EagerForward:
    """A pass for each draft position; the host sees every draft.

    Args:
        runner: the draft model.
        mapping: from its ids to the target's, which rows and drafts have; None = they are the same.
        num_candidates: likeliest tokens that drafts are drawn from, with private noise; 0 = all, with the target's noise.
    """

    def __init__(self, runner: ModelRunner, mapping: VocabMapping | None = None, num_candidates: int = 0) -> None:
        self.counts = PassCounts()
        self._runner = runner
        self._mapping = mapping if mapping is None else mapping.to(runner.model.device)
        self._num_candidates = num_candidates
        self._sampling: dict[int, DraftSampling] = {}

    def open(self, slot: int, sampling: DraftSampling) -> None:
        """See `DraftForward.open`."""
        self._sampling[slot] = sampling

    def compute(self, rows: Sequence[DraftRow]) -> None:
        """See `DraftForward.compute`."""
        if rows:
            self.run([self._segment(row) for row in rows])

    def launch(self, rows: Sequence[DraftRow]) -> Callable[[], list[DraftTokens]]:
        """See `DraftForward.launch`; nothing is left to wait for."""
        drawn = Drawn(len(rows))
        live = list(range(len(rows)))
        segments = [self._segment(row) for row in rows]
        for position in range(max((row.num_drafts for row in rows), default=0)):
            if position:
                live = [index for index in live if rows[index].num_drafts > position]
                segments = [
                    Segment(self.model_ids(drawn.token_ids[index][-1:]), _end(rows[index]) + position - 1, rows[index].block_table) for index in live
                ]
            hidden, starts = self.run(segments)
            samples = self.draw(
                hidden[torch.tensor(starts[1:], device=hidden.device) - 1],
                [rows[index].slot for index in live],
                [_end(rows[index]) + position for index in live],
            )
            drawn.add(live, samples)
        return drawn.drafts

    def model_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """What the draft model reads for the target's ids."""
        return token_ids if self._mapping is None else self._mapping.draft_ids(token_ids)

    def run(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """One pass. Returns hidden states [T, hidden_size] and the first row of each segment, with T at the end."""
        batch = self._runner.batch(segments)
        self.counts.add_eager(batch.num_tokens)
        return self._runner.forward(batch), batch.row_starts

    def draw(self, hidden: torch.Tensor, slots: Sequence[int], indices: Sequence[int]) -> DraftSamples:
        """A draft for each row of hidden states [R, hidden_size], in the target's ids, each of a slot and with the noise of an index."""
        logits, mapping = self._runner.logits(hidden, range(len(hidden))), self._mapping
        sampling = [self._sampling[slot] for slot in slots]
        logits = logits if mapping is None else logits.index_select(1, mapping.columns)
        target_ids = None if mapping is None else mapping.target_ids
        temperatures, keys, choices = [one.temperature for one in sampling], [one.key for one in sampling], [one.choice for one in sampling]
        if self._num_candidates:
            return propose_drafts(
                logits, self._num_candidates, temperatures=temperatures, keys=keys, indices=indices, choices=choices, target_ids=target_ids
            )
        return sample_draft(
            logits,
            temperatures=temperatures,
            keys=keys,
            indices=indices,
            choices=choices,
            target_ids=target_ids,
            target_vocab_size=None if mapping is None else mapping.size,
        )

    def _segment(self, row: DraftRow) -> Segment:
        return Segment(self.model_ids(row.token_ids), row.start_position, row.block_table)


def _end(row: DraftRow) -> int:
    """Tokens of the sequence up to the row's last one."""
    return row.start_position + len(row.token_ids)
