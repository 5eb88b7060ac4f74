"""The pass of a head that drafts a block at once, on the device: KV of the features that are new, the block, and its drafts one after another."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specwire.engine.graphs.backends import Attention, Backend
from specwire.engine.graphs.draft_call import read_call
from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import HEADER, ROW, DraftRow
from specwire.engine.graphs.sent_features import SentFeatures
from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.device import DevicePass
from specwire.engine.heads.markov import Candidates
from specwire.engine.kv_cache import KVCache
from specwire.engine.sampling.philox import Stream, gumbel, noise_words_at

_LAST_ID = torch.iinfo(torch.int64).max


class _Block(NamedTuple):
    """Inputs and attention of so many rows."""

    inputs: DraftInputs
    attention: Attention


class BlockPasses:
    """See `DraftPasses`. Token i of a row is the one behind position i, so that a row's last token is the anchor of its block.

    Args:
        head: the model.
        width: numbers of a feature.
        kv_cache: of its layers.
        backend: the kernels.
        upload: the call's message, on the device.
        tables: [N, max_blocks] int32, block tables of all slots; blocks may reach num_queries positions behind a sequence's last.
        rows: of the largest call.
        following: not used: nothing follows.
        max_num_tokens: of the largest pass.
    """

    def __init__(
        self,
        head: BlockHead,
        width: int,
        kv_cache: KVCache,
        backend: Backend,
        upload: torch.Tensor,
        tables: torch.Tensor,
        rows: DraftRows,
        following: DraftInputs,
        max_num_tokens: int,
    ) -> None:
        self._head, self._kv_cache, self._backend = head, kv_cache, backend
        self._upload, self._tables, self._rows = upload, tables, rows
        device, vocabulary, num_rows = upload.device, head.vocabulary, len(rows.num_drafts)
        self._num_drafts = rows.results.shape[2]
        self._features = SentFeatures(max_num_tokens, width, head.tables.cos.dtype, device)
        self._inputs = DraftInputs.allocate(num_rows, num_rows * head.num_queries, torch.zeros_like(tables))
        self._offsets = torch.arange(head.num_queries, device=device)
        self._blocks: dict[int, _Block] = {}
        self._logits = torch.zeros((num_rows * self._num_drafts, vocabulary.num_drafted), dtype=torch.float32, device=device)
        # What can't be drafted stays at minus infinity.
        self._all_logits = None if vocabulary.target_ids is None else torch.full((num_rows, vocabulary.size), -torch.inf, device=device)

    def send(self, rows: Sequence[DraftRow]) -> None:
        """See `DraftPasses.send`."""
        self._features.send(rows)

    def compute(self, inputs: DraftInputs, attention: Attention) -> None:
        """See `DraftPasses.compute`: features attend to nothing."""
        read_call(self._backend, self._upload, self._tables, inputs, self._rows, self._kv_cache)
        self._head.write_context_on(self._features.on_device[: len(inputs.token_ids)], self._pass(inputs, None))

    def first(self, inputs: DraftInputs, attention: Attention) -> None:
        """See `DraftPasses.first`: all drafts of each row, as many as any wants."""
        self.compute(inputs, attention)
        head, num_rows = self._head, len(inputs.seq_lens)
        block, rows = self._block(num_rows), self._rows.first(num_rows)
        anchors = inputs.token_ids.index_select(0, rows.last_rows)
        self._fill(block.inputs, inputs.seq_lens, anchors)
        block.attention.update(block.inputs)
        hidden = head.run(self._pass(block.inputs, block.attention)).view(num_rows, head.num_queries, -1)
        self._draw(hidden[:, head.first_draft : head.first_draft + self._num_drafts], inputs.seq_lens, anchors, rows)

    def _pass(self, inputs: DraftInputs, attention: Attention | None) -> DevicePass:
        return DevicePass(self._head.tables, self._kv_cache, self._backend, inputs, attention)

    def _block(self, num_rows: int) -> _Block:
        """Made before the first capture of its size: a size runs once without one."""
        size = self._head.num_queries
        if num_rows not in self._blocks:
            attention = self._backend.attention(num_rows, num_rows * size, size, is_causal=self._head.is_causal)
            self._blocks[num_rows] = _Block(self._inputs.first(num_rows, num_rows * size), attention)
        return self._blocks[num_rows]

    def _fill(self, block: DraftInputs, ends: torch.Tensor, anchors: torch.Tensor) -> None:
        """Inputs of the block's pass: an anchor and masks behind the rows' ends [R]; rows that end at 0 are padding.

        Here and below `masked_fill` stands for `torch.where` with a number, which copies it to the device: no capture allows that.
        """
        num_rows, size, cache = len(ends), self._head.num_queries, self._kv_cache
        is_padding = ends == 0
        slots = self._upload[HEADER : HEADER + num_rows * ROW].view(num_rows, ROW)[:, 0]
        block.block_tables.copy_(self._tables.index_select(0, slots.masked_fill(is_padding, 0)))
        positions = (ends[:, None] + self._offsets).masked_fill(is_padding[:, None], 0)  # [R, Q]
        places = block.block_tables.gather(1, positions // cache.block_size).long() * cache.block_size + positions % cache.block_size
        block.token_ids.fill_(self._head.mask_token_id)
        block.token_ids.view(num_rows, size)[:, 0] = anchors
        block.positions.copy_(positions.flatten())
        block.slot_mapping.copy_(places.masked_fill(is_padding[:, None], cache.scratch_block * cache.block_size).flatten())
        block.cu_seqlens_q[1:] = (~is_padding).cumsum(0) * size  # padding is behind all others
        block.seq_lens.copy_((ends + size).masked_fill(is_padding, 0))

    def _draw(self, hidden: torch.Tensor, ends: torch.Tensor, previous: torch.Tensor, rows: DraftRows) -> None:
        """Drafts of hidden [R, K, hidden_size], whose i-th one has the index ends + 1 + i; each may depend on the one before it."""
        head, num_rows, num_drafts = self._head, len(hidden), self._num_drafts
        logits = self._logits[: num_rows * num_drafts]
        head.vocabulary.head.write(hidden.flatten(0, 1), logits)
        every = Candidates(None, logits) if head.markov is None else head.markov.candidates(logits)
        values = every.logits.unflatten(0, (num_rows, num_drafts))
        columns = None if every.columns is None else every.columns.unflatten(0, (num_rows, num_drafts))
        ids = noise = None
        if columns is not None:
            ids = columns if head.vocabulary.target_ids is None else head.vocabulary.target_ids[columns]
            noise = self._noise(ids, ends, rows)
        for position in range(num_drafts):
            candidates = Candidates(None if columns is None else columns[:, position], values[:, position])
            if head.markov is not None:
                candidates = candidates._replace(logits=head.markov.biased(candidates, previous))
            if ids is not None and noise is not None:
                token_ids, scores = _draw_among(ids[:, position], candidates.logits, noise[:, position], rows.temperatures)
            else:
                token_ids, scores = self._draw_of_all(candidates.logits, ends + 1 + position, rows)
            if head.confidence is not None:
                scores = head.confidence(hidden[:, position], previous, position)
            rows.results[:, 0, position] = token_ids.int()
            rows.results[:, 1, position] = scores.float().view(torch.int32)
            previous = token_ids

    def _noise(self, ids: torch.Tensor, ends: torch.Tensor, rows: DraftRows) -> torch.Tensor:
        """Temperature x noise of ids [R, K, m], all at once: it does not depend on what is drawn."""
        num_drafts = ids.shape[1]
        indices = (ends.long()[:, None] + 1 + torch.arange(num_drafts, device=ids.device)).flatten()
        keys, choices = rows.keys.repeat_interleave(num_drafts), rows.choices.long().repeat_interleave(num_drafts)
        noise = gumbel(noise_words_at(keys, indices, choices, Stream.TARGET, ids.flatten(0, 1))).view_as(ids)
        return noise * rows.temperatures[:, None, None]

    def _draw_of_all(self, logits: torch.Tensor, indices: torch.Tensor, rows: DraftRows) -> tuple[torch.Tensor, torch.Tensor]:
        target_ids = self._head.vocabulary.target_ids
        if self._all_logits is not None and target_ids is not None:
            logits = self._all_logits[: len(logits)].index_copy_(1, target_ids, logits)
        token_ids, probs = self._backend.drafts.draft_sample(logits, rows.temperatures, rows.keys, indices, rows.choices)
        return token_ids, probs


def _draw_among(ids: torch.Tensor, logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `specwire.engine.sampling.draft.sample_draft_among`, with noise that is there already: ids, logits and noise [R, m]."""
    scores = logits + noise
    chosen = ids.masked_fill(scores != scores.amax(1, keepdim=True), _LAST_ID).amin(1)
    scaled = logits / temperatures.masked_fill(temperatures <= 0, 1.0)[:, None]
    probs = scaled.softmax(1).masked_fill(ids != chosen[:, None], 0.0).sum(1)
    is_bad = ~logits.amax(1).isfinite()
    return torch.where(is_bad, ids[:, 0], chosen), probs.clamp(max=1.0).masked_fill(is_bad, 0.0)
