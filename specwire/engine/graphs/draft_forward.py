"""The passes of drafting on the device: fixed lists of kernels over tensors of fixed size, which graphs can hold."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from specwire.engine.graphs.backends import Attention, Backend
from specwire.engine.graphs.draft_call import read_call
from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.graphs.draft_upload import DraftRow
from specwire.engine.graphs.layers import run_layers
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder


class DraftPasses(Protocol):
    """The passes of a call; each but `send` may be captured."""

    def send(self, rows: Sequence[DraftRow]) -> None:
        """Starts the upload of what the rows of a call have beside tokens."""
        ...

    def compute(self, inputs: DraftInputs, attention: Attention) -> object:
        """The uploaded tokens: writes their KV."""
        ...

    def first(self, inputs: DraftInputs, attention: Attention) -> None:
        """The uploaded tokens and the first draft of each row, or all of them."""
        ...


@runtime_checkable
class SteppedPasses(DraftPasses, Protocol):
    """Passes that draft one by one."""

    def step(self, inputs: DraftInputs, attention: Attention) -> None:
        """One more draft of each row that wants one, from the one that the pass before has drawn."""
        ...


class DraftForward:
    """Nothing that depends on the composition of a call, waits for the device or allocates by content may be added here.

    Args:
        model: the draft model.
        kv_cache: of all layers.
        backend: the kernels.
        upload: the call's message, on the device.
        tables: [N, max_blocks] int32, block tables of all slots.
        rows: of the largest call.
        following: inputs of the largest pass of one token a row.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: Backend,
        upload: torch.Tensor,
        tables: torch.Tensor,
        rows: DraftRows,
        following: DraftInputs,
    ) -> None:
        self._model, self._head = model, model.weights.head
        self._kv_cache = kv_cache
        self._backend = backend
        self._upload, self._tables, self._rows, self._following = upload, tables, rows, following
        self._logits = torch.zeros((len(following.seq_lens), model.config.vocab_size), dtype=torch.float32, device=model.device)

    def send(self, rows: Sequence[DraftRow]) -> None:
        """Nothing: tokens are all that a model reads."""

    def compute(self, inputs: DraftInputs, attention: Attention) -> torch.Tensor:
        """The uploaded tokens: writes their KV; returns hidden states [T, hidden_size]."""
        read_call(self._backend, self._upload, self._tables, inputs, self._rows, self._kv_cache)
        return self._layers(inputs, attention)

    def first(self, inputs: DraftInputs, attention: Attention) -> None:
        """The uploaded tokens and the first draft of each row."""
        hidden = self.compute(inputs, attention)
        self._draft(hidden.index_select(0, self._rows.last_rows[: len(inputs.seq_lens)]), inputs)

    def step(self, inputs: DraftInputs, attention: Attention) -> None:
        """One more draft of each row that wants one, from the one that the pass before has drawn."""
        self._draft(self._layers(inputs, attention), inputs)

    def _layers(self, inputs: DraftInputs, attention: Attention) -> torch.Tensor:
        attention.update(inputs)
        return run_layers(self._model, self._kv_cache, self._backend, inputs, attention)

    def _draft(self, hidden: torch.Tensor, inputs: DraftInputs) -> None:
        """hidden: [R, hidden_size]."""
        num_rows, cache = len(hidden), self._kv_cache
        logits, following = self._logits[:num_rows], self._following.first(num_rows, num_rows)
        self._backend.head(self._head, hidden, logits)
        self._backend.drafts.draft(logits, inputs, following, self._rows.first(num_rows), cache.block_size, cache.scratch_block)
