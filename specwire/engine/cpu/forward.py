"""A decoder's forward pass over tiled weights, as jobs of a team of threads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specwire.engine.cpu.forms import form_of, widest_row
from specwire.engine.cpu.job import NUM_PHASES, LayerWord, Phase, Word
from specwire.engine.cpu.layers import FEW_PIECES, FEW_ROWS, MANY_PIECES, ROWS_PER_PIECE, Layers, Scratch
from specwire.engine.cpu.team import Team
from specwire.engine.kernels.linear import LogitsHead
from specwire.engine.models.config import ModelConfig
from specwire.errors import UnsupportedError

if TYPE_CHECKING:
    from specwire.engine.batch import RaggedBatch
    from specwire.engine.features.pages import Taps
    from specwire.engine.models.layer import LayerWeights

_LANES = 16


class TiledForward:
    """Layers, final norm and head of one model, on as many threads as torch has when the first pass runs.

    Args:
        layers: with `TiledLinear`s or with `HalfLinear`s.
        final_norm: float32 [hidden_size].
        head: with a `TiledHead` or a `HalfLinear`, as the layers.
        cos, signed_sin: float32 [max_position_embeddings, head_dim], contiguous, as `rope_table` gives them.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: "Sequence[LayerWeights]",
        final_norm: torch.Tensor,
        head: LogitsHead,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
    ) -> None:
        if config.head_dim % _LANES:
            raise UnsupportedError(
                f"a model with head_dim {config.head_dim} can't be computed in 4 bits here: that needs a multiple of {_LANES}; take --weights bf16"
            )
        self._config = config
        self._form = form_of(config, head.linear)
        self._num_layers = len(layers)
        self._layers = Layers(config, layers, final_norm, cos, signed_sin)
        self._parts = {phase: self._form.num_parts(width, is_gated=phase == Phase.GATE_UP) for phase, width in self._layers.widths.items()}
        self._team: Team | None = None
        self._capacity = 0
        self._scratch = Scratch()
        self._buffers: dict[Word, torch.Tensor] = {}

    def forward(self, batch: "RaggedBatch", residual: torch.Tensor, kv_layers: Sequence[torch.Tensor], taps: "Taps") -> torch.Tensor:
        """Computes T tokens and writes their KV. Returns float32 hidden states after the final norm [T, hidden_size].

        Args:
            batch: on the CPU.
            residual: its embeddings, float32 [T, hidden_size], overwritten.
            kv_layers: a layer each, bfloat16 [num_blocks, block_size, 2, num_kv_heads, head_dim].
            taps: takes the residual stream in front of layers.
        """
        num_rows = batch.num_tokens
        self._layers.table[:, LayerWord.KV] = [layer.data_ptr() for layer in kv_layers]
        words = self._prepare(num_rows)
        self._reserve_scratch(int(batch.seq_lens.max()))
        out = torch.empty(num_rows, self._config.hidden_size)
        tables = batch.block_tables.long().numpy()
        groups = self._row_groups(batch.row_starts, tables)
        words[Word.IS_HEAD] = 0
        words[Word.BLOCK_SIZE] = kv_layers[0].shape[1]
        words[Word.RESIDUAL], words[Word.OUT] = residual.data_ptr(), out.data_ptr()
        words[Word.POSITIONS], words[Word.SLOTS] = batch.positions.data_ptr(), batch.slot_mapping.data_ptr()
        words[Word.ROW_GROUPS] = groups.ctypes.data
        row_pieces = self._num_row_pieces(num_rows)
        counts = [row_pieces] * NUM_PHASES
        counts[Phase.ATTEND] = len(groups) * self._config.num_kv_heads
        most = self._num_threads * (FEW_PIECES if num_rows <= FEW_ROWS else MANY_PIECES)
        for phase, num_parts in self._parts.items():
            counts[phase] = min(num_parts, most)
        tapped = {layer_id: torch.empty_like(residual) for layer_id in taps.layer_ids if layer_id >= 0}
        self._layers.table[:, LayerWord.TAP] = [tapped[layer].data_ptr() if layer in tapped else 0 for layer in range(self._num_layers)]
        words[Word.TAP] = tapped[self._num_layers].data_ptr() if self._num_layers in tapped else 0
        self._run(words, counts, self._num_layers, row_pieces)
        for layer_id, state in tapped.items():
            taps.take(layer_id, state)
        return out

    def _row_groups(self, row_starts: Sequence[int], tables: np.ndarray) -> np.ndarray:
        """Rows of one sequence that share what attention reads, int64 [groups, 3]: first row, number of rows, address of the block table."""
        starts = np.asarray(row_starts, dtype=np.int64)
        counts = np.diff(starts)
        num_groups = -(-counts // self._layers.rows_per_group)
        of = np.arange(len(counts)).repeat(num_groups)  # segment of each group
        number = np.arange(len(of)) - (num_groups.cumsum() - num_groups)[of]  # in its segment
        first, last = (counts[of] * index // num_groups[of] for index in (number, number + 1))
        return np.stack((starts[of] + first, last - first, tables.ctypes.data + of * tables.strides[0]), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 hidden [R, hidden_size] -> float32 [R, vocab_size]."""
        num_rows, form = len(hidden), self._form
        words = self._prepare(num_rows)
        self._reserve_scratch(1)
        hidden, out = hidden.contiguous(), torch.empty(num_rows, form.head_features)
        beside = form.take_head_input(words, hidden)
        words[Word.IS_HEAD] = 1
        words[Word.NORMED], words[Word.OUT] = hidden.data_ptr(), out.data_ptr()
        counts = [0] * NUM_PHASES
        counts[0], counts[1] = self._num_row_pieces(num_rows), min(form.num_parts(form.head_features), self._num_threads * MANY_PIECES)
        self._run(words, counts, 1, 0)
        del beside
        return out[:, : form.vocab_size]

    def _run(self, words: np.ndarray, counts: Sequence[int], num_layers: int, num_last: int) -> None:
        """Runs num_layers times phases of so many pieces, then num_last pieces."""
        starts = np.cumsum([0, *counts])
        words[Word.STARTS : Word.STARTS + NUM_PHASES + 1] = starts
        words[Word.PER_LAYER] = starts[-1]
        words[Word.TOTAL] = num_layers * starts[-1] + num_last
        assert self._team is not None, "the words are a team's"
        self._team.run()

    def _prepare(self, num_rows: int) -> np.ndarray:
        """The team's words, with buffers for so many rows."""
        if self._team is None:
            self._team = Team(torch.get_num_threads(), self._form.enter())
            self._fill_constants(self._team.words)
        words = self._team.words
        if num_rows > self._capacity:
            self._capacity = num_rows
            self._buffers = self._layers.row_buffers(num_rows) | self._form.make_buffers(num_rows, widest_row(self._config))
        for word, buffer in self._buffers.items():
            words[word] = buffer.data_ptr()
        words[Word.NUM_ROWS] = num_rows
        return words

    @property
    def _num_threads(self) -> int:
        assert self._team is not None, "the threads are a team's"
        return self._team.num_threads

    def _num_row_pieces(self, num_rows: int) -> int:
        return min(num_rows, self._num_threads) if num_rows <= FEW_ROWS else -(-num_rows // ROWS_PER_PIECE)

    def _reserve_scratch(self, num_positions: int) -> None:
        assert self._team is not None, "the threads are a team's"
        self._scratch.reserve(self._team, self._layers.num_scratch_floats(num_positions))

    def _fill_constants(self, words: np.ndarray) -> None:
        for word, value in (self._layers.constants() | self._form.constants()).items():
            words[word] = value
