"""The passes of a head that drafts token by token, on the device: beside tokens they read features, of the target first, then their own."""

from collections.abc import Sequence

import torch

from specwire.engine.graphs.backends import Attention, Backend
from specwire.engine.graphs.draft_call import read_call
from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import DraftRow
from specwire.engine.graphs.sent_features import SentFeatures
from specwire.engine.heads.device import DevicePass, HeadStates
from specwire.engine.heads.head import SequentialHead
from specwire.engine.kv_cache import KVCache


class HeadPasses:
    """See `DraftPasses`. Token i of a row is the one behind position i: what is drafted behind T of them has index T + 1.

    Args:
        head: the model.
        width: numbers of a feature.
        kv_cache: of its layers.
        backend: the kernels.
        upload: the call's message, on the device.
        tables: [N, max_blocks] int32, block tables of all slots.
        rows: of the largest call.
        following: inputs of the largest pass of one token a row.
        max_num_tokens: of the largest pass.
    """

    def __init__(
        self,
        head: SequentialHead,
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
        self._upload, self._tables, self._rows, self._following = upload, tables, rows, following
        dtype, device, vocabulary = head.tables.cos.dtype, upload.device, head.vocabulary
        num_rows = len(following.seq_lens)
        self._features = SentFeatures(max_num_tokens, width, dtype, device)
        self._carried = torch.zeros((num_rows, width), dtype=dtype, device=device)
        self._logits = torch.zeros((num_rows, vocabulary.num_drafted), dtype=torch.float32, device=device)
        # What can't be drafted stays at minus infinity.
        self._all_logits = None if vocabulary.target_ids is None else torch.full((num_rows, vocabulary.size), -torch.inf, device=device)

    def send(self, rows: Sequence[DraftRow]) -> None:
        """See `DraftPasses.send`."""
        self._features.send(rows)

    def compute(self, inputs: DraftInputs, attention: Attention) -> HeadStates:
        """See `DraftPasses.compute`."""
        read_call(self._backend, self._upload, self._tables, inputs, self._rows, self._kv_cache)
        return self._pass(self._features.on_device[: len(inputs.token_ids)], inputs, attention)

    def first(self, inputs: DraftInputs, attention: Attention) -> None:
        """See `DraftPasses.first`."""
        states, last_rows = self.compute(inputs, attention), self._rows.last_rows[: len(inputs.seq_lens)]
        self._draft(HeadStates(states.output.index_select(0, last_rows), states.carried.index_select(0, last_rows)), inputs)

    def step(self, inputs: DraftInputs, attention: Attention) -> None:
        """See `SteppedPasses.step`. Rows keep their places from pass to pass, and so do the features that they carry."""
        self._draft(self._pass(self._carried[: len(inputs.token_ids)], inputs, attention), inputs)

    def _pass(self, features: torch.Tensor, inputs: DraftInputs, attention: Attention) -> HeadStates:
        attention.update(inputs)
        return self._head.run(features, DevicePass(self._head.tables, self._kv_cache, self._backend, inputs, attention))

    def _draft(self, states: HeadStates, inputs: DraftInputs) -> None:
        """states: of R rows."""
        num_rows, cache, drafts = len(states.output), self._kv_cache, self._backend.drafts
        rows, following, logits = self._rows.first(num_rows), self._following.first(num_rows, num_rows), self._logits[:num_rows]
        self._carried[:num_rows].copy_(states.carried)
        self._head.vocabulary.head.write(states.output, logits)
        if self._all_logits is not None and self._head.vocabulary.target_ids is not None:
            logits = self._all_logits[:num_rows].index_copy_(1, self._head.vocabulary.target_ids, logits)
        token_ids, probs = drafts.draft_sample(logits, rows.temperatures, rows.keys, inputs.seq_lens + 1, rows.choices)
        drafts.advance(inputs, following, rows, token_ids, probs, cache.block_size, cache.scratch_block)
