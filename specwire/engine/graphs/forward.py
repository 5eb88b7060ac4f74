"""A round on the device from the upload to the results: a fixed list of kernels over tensors of fixed size, which a graph can hold."""

import torch

from specwire.engine.graphs.backends import Attention, Backend
from specwire.engine.graphs.layers import run_layers
from specwire.engine.graphs.tensors import RoundInputs, SlotState
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder


class RoundForward:
    """Nothing that depends on the composition of a round, waits for the device or allocates by content may be added here.

    Args:
        model: the decoder; its weights are shared with `Decoder.forward`.
        kv_cache: of all layers.
        backend: the kernels.
        state: of all slots.
        upload: the round's message, on the device.
        num_logit_rows: rows of the buffer that keeps the logits.
    """

    def __init__(self, model: Decoder, kv_cache: KVCache, backend: Backend, state: SlotState, upload: torch.Tensor, num_logit_rows: int) -> None:
        self._model, self._weights = model, model.weights
        self._kv_cache = kv_cache
        self._backend = backend
        self._state = state
        self._upload = upload
        self.logits = torch.zeros((num_logit_rows, model.config.vocab_size), dtype=torch.float32, device=model.device)
        """Raw logits of the last round, [L, vocab_size]."""

    def run(self, inputs: RoundInputs, attention: Attention) -> None:
        """Runs the uploaded round in the sizes of `inputs`."""
        rounds, rows, state, cache = self._backend.rounds, self._backend.rows, self._state, self._kv_cache
        rounds.apply_changes(self._upload, state)
        rounds.prepare(self._upload, state, inputs, cache.block_size, cache.scratch_block)
        attention.update(inputs)
        hidden = run_layers(self._model, cache, self._backend, inputs, attention)
        logits = self.logits[: len(inputs.logit_rows)]
        self._backend.head(self._weights.head, hidden.index_select(0, inputs.logit_rows), logits)
        rows.find_cuts(logits, state, inputs)
        target_ids = rows.sample_targets(logits, state, inputs)
        rounds.accept(self._upload, state, inputs, target_ids)
        rows.report_logprobs(logits, state, inputs)
