"""A decoder's forward pass over tiled weights, as jobs of a team of threads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specwire.engine.cpu.attention import num_scratch_floats
from specwire.engine.cpu.forms import form_of, tiled, widest_row
from specwire.engine.cpu.job import NUM_PHASES, SCRATCH_HEADER, LayerWord, Phase, Word
from specwire.engine.cpu.team import Team
from specwire.engine.kernels.linear import LogitsHead
from specwire.engine.models.config import ModelConfig
from specwire.errors import UnsupportedError

if TYPE_CHECKING:
    from specwire.engine.batch import RaggedBatch
    from specwire.engine.features.pages import Taps
    from specwire.engine.models.layer import LayerWeights

_LANES = 16
FEW_ROWS = 8
FEW_PIECES, MANY_PIECES = 4, 16
"""Of a product, for each thread, where a pass has few rows, and where it has many or the product is a head's. To take a piece and to hand it
back costs 0.2 us; the fewer there are, the longer others wait for the last."""
ROWS_PER_PIECE = 4
"""Of what is done row by row, for more than few rows; fewer are dealt out evenly."""
QUERIES_PER_PIECE = 12
"""Of attention, where rows of a sequence share keys and values: more share more, fewer are easier to deal out to threads."""


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
        self._form = form_of(config, layers, head.linear)
        self._num_layers = len(layers)
        self._parts = {
            Phase.QKV: self._form.num_parts((config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
            Phase.O: self._form.num_parts(config.hidden_size),
            Phase.GATE_UP: self._form.num_parts(config.intermediate_size, is_gated=True),
            Phase.DOWN: self._form.num_parts(config.hidden_size),
        }
        self._rows_per_group = max(1, QUERIES_PER_PIECE * config.num_kv_heads // config.num_heads)
        self._tensors: list[torch.Tensor] = []  # what the addresses in the table belong to
        self._constants = final_norm, cos, signed_sin
        self._floats = torch.tensor([config.rms_norm_eps, config.head_dim**-0.5])
        self._table = np.zeros((len(layers), LayerWord.COUNT), dtype=np.int64)
        for words, layer in zip(self._table, layers, strict=True):
            self._tensors += fill_layer(words, layer)
        self._team: Team | None = None
        self._capacity = 0
        self._scratch = torch.empty(0)
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
        self._table[:, LayerWord.KV] = [layer.data_ptr() for layer in kv_layers]
        words = self._prepare(num_rows)
        self._reserve_scratch(words, int(batch.seq_lens.max()))
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
        self._table[:, LayerWord.TAP] = [tapped[layer].data_ptr() if layer in tapped else 0 for layer in range(self._num_layers)]
        words[Word.TAP] = tapped[self._num_layers].data_ptr() if self._num_layers in tapped else 0
        self._run(words, counts, self._num_layers, row_pieces)
        for layer_id, state in tapped.items():
            taps.take(layer_id, state)
        return out

    def _row_groups(self, row_starts: Sequence[int], tables: np.ndarray) -> np.ndarray:
        """Rows of one sequence that share what attention reads, int64 [groups, 3]: first row, number of rows, address of the block table."""
        starts = np.asarray(row_starts, dtype=np.int64)
        counts = np.diff(starts)
        num_groups = -(-counts // self._rows_per_group)
        of = np.arange(len(counts)).repeat(num_groups)  # segment of each group
        number = np.arange(len(of)) - (num_groups.cumsum() - num_groups)[of]  # in its segment
        first, last = (counts[of] * index // num_groups[of] for index in (number, number + 1))
        return np.stack((starts[of] + first, last - first, tables.ctypes.data + of * tables.strides[0]), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 hidden [R, hidden_size] -> float32 [R, vocab_size]."""
        num_rows, form = len(hidden), self._form
        words = self._prepare(num_rows)
        self._reserve_scratch(words, 1)
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
            self._buffers = self._make_buffers(num_rows)
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

    def _make_buffers(self, num_rows: int) -> dict[Word, torch.Tensor]:
        config = self._config
        heads_width = config.num_heads * config.head_dim
        return {
            Word.NORMED: torch.empty(num_rows, config.hidden_size),
            Word.QKV: torch.empty(num_rows, heads_width + 2 * config.num_kv_heads * config.head_dim),
            Word.ATTENDED: torch.empty(num_rows, heads_width),
            Word.ACT: torch.empty(num_rows, config.intermediate_size),
        } | self._form.make_buffers(num_rows, widest_row(config))

    def _reserve_scratch(self, words: np.ndarray, num_positions: int) -> None:
        assert self._team is not None, "the words are a team's"
        config = self._config
        num_queries = self._rows_per_group * config.num_heads // config.num_kv_heads
        needed = SCRATCH_HEADER + num_scratch_floats(num_queries, num_positions, config.head_dim)
        if not self._scratch.numel() or needed > self._scratch.shape[1]:
            # Twice as much, so that a growing sequence does not ask for more in each step; whole cache lines apart.
            self._scratch = torch.empty(self._team.num_threads, -(-2 * needed // 64) * 64)
            words[Word.SCRATCH], words[Word.SCRATCH_BYTES] = self._scratch.data_ptr(), 4 * self._scratch.shape[1]

    def _fill_constants(self, words: np.ndarray) -> None:
        config = self._config
        final_norm, cos, signed_sin = self._constants
        for word, value in {
            Word.NUM_LAYERS: self._num_layers,
            Word.LAYERS: self._table.ctypes.data,
            Word.HIDDEN: config.hidden_size,
            Word.INNER: config.intermediate_size,
            Word.HEADS: config.num_heads,
            Word.KV_HEADS: config.num_kv_heads,
            Word.DIM: config.head_dim,
            Word.FLOATS: self._floats.data_ptr(),
            Word.FINAL_NORM: final_norm.data_ptr(),
            Word.COS: cos.data_ptr(),
            Word.SIN: signed_sin.data_ptr(),
            **self._form.constants(),
        }.items():
            words[word] = value


def fill_layer(words: np.ndarray, layer: "LayerWeights") -> list[torch.Tensor]:
    """Fills in a layer's `LayerWord`s; returns what their addresses belong to."""
    tensors: list[torch.Tensor] = []
    for norm, tensor in {
        LayerWord.INPUT_NORM: layer.input_norm,
        LayerWord.Q_NORM: layer.q_norm,
        LayerWord.K_NORM: layer.k_norm,
        LayerWord.POST_NORM: layer.post_norm,
    }.items():
        if tensor is not None:
            tensors.append(tensor.float())
            words[norm] = tensors[-1].data_ptr()
    for weight, bias, linear in (
        (LayerWord.QKV, LayerWord.QKV_BIAS, layer.qkv),
        (LayerWord.O, LayerWord.O_BIAS, layer.o),
        (LayerWord.GATE_UP, LayerWord.GATE_UP_BIAS, layer.gate_up),
        (LayerWord.DOWN, LayerWord.DOWN_BIAS, layer.down),
    ):
        product = tiled(linear)
        tensors.append(product.weight)
        words[weight] = product.weight.data_ptr()
        if product.float_bias is not None:
            tensors.append(product.float_bias)
            words[bias] = product.float_bias.data_ptr()
    return tensors
