"""What passes over a model's layers have in common, whatever computes them: the layers as a job sees them, and the threads' own memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specwire.engine.cpu.attention import num_scratch_floats
from specwire.engine.cpu.forms import tiled
from specwire.engine.cpu.job import SCRATCH_HEADER, LayerWord, Phase, Word
from specwire.engine.cpu.team import Team
from specwire.engine.models.config import ModelConfig

if TYPE_CHECKING:
    from specwire.engine.models.layer import LayerWeights

FEW_ROWS = 8
FEW_PIECES, MANY_PIECES = 4, 16
"""Of a product, for each thread, where a pass has few rows, and where it has many or the product is a head's. To take a piece and to hand it
back costs 0.2 us; the fewer there are, the longer others wait for the last."""
ROWS_PER_PIECE = 4
"""Of what is done row by row, for more than few rows; fewer are dealt out evenly."""
_QUERIES_PER_PIECE = 12
"""Of attention, where rows of a sequence share keys and values: more share more, fewer are easier to deal out to threads."""


class Layers:
    """Layers and final norm of one model.

    Args:
        layers: with products of one of the classes that `forms.tiled` knows.
        final_norm: float32 [hidden_size].
        cos, signed_sin: float32 [max_position_embeddings, head_dim], contiguous, as `rope_table` gives them.

    Attributes:
        table: int64 [num_layers, LayerWord.COUNT]; whoever runs a pass fills in where KV and taps are.
        rows_per_group: most rows of a sequence that are one piece of attention.
        widths: features of the product of each phase that has one; of gate alone, for gate and up.
    """

    def __init__(
        self, config: ModelConfig, layers: "Sequence[LayerWeights]", final_norm: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
    ) -> None:
        self._config = config
        self._tables = final_norm, cos, signed_sin
        self._floats = torch.tensor([config.rms_norm_eps, config.head_dim**-0.5])
        self._tensors: list[torch.Tensor] = []  # what the addresses in the table belong to
        self.table = np.zeros((len(layers), LayerWord.COUNT), dtype=np.int64)
        for words, layer in zip(self.table, layers, strict=True):
            self._tensors += _fill_layer(words, layer)
        self.rows_per_group = max(1, _QUERIES_PER_PIECE * config.num_kv_heads // config.num_heads)
        self.widths = {
            Phase.QKV: (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            Phase.O: config.hidden_size,
            Phase.GATE_UP: config.intermediate_size,
            Phase.DOWN: config.hidden_size,
        }

    def constants(self) -> dict[Word, int]:
        """Words of every job over these layers."""
        config = self._config
        final_norm, cos, signed_sin = self._tables
        return {
            Word.NUM_LAYERS: len(self.table),
            Word.LAYERS: self.table.ctypes.data,
            Word.HIDDEN: config.hidden_size,
            Word.INNER: config.intermediate_size,
            Word.HEADS: config.num_heads,
            Word.KV_HEADS: config.num_kv_heads,
            Word.DIM: config.head_dim,
            Word.FLOATS: self._floats.data_ptr(),
            Word.FINAL_NORM: final_norm.data_ptr(),
            Word.COS: cos.data_ptr(),
            Word.SIN: signed_sin.data_ptr(),
        }

    def row_buffers(self, num_rows: int) -> dict[Word, torch.Tensor]:
        """What layers write of so many rows on their way, but for what a form prepares rows in."""
        config = self._config
        heads_width = config.num_heads * config.head_dim
        return {
            Word.NORMED: torch.empty(num_rows, config.hidden_size),
            Word.QKV: torch.empty(num_rows, self.widths[Phase.QKV]),
            Word.ATTENDED: torch.empty(num_rows, heads_width),
            Word.ACT: torch.empty(num_rows, config.intermediate_size),
        }

    def num_scratch_floats(self, num_positions: int) -> int:
        """Of a thread, for attention over so many positions."""
        num_queries = self.rows_per_group * self._config.num_heads // self._config.num_kv_heads
        return num_scratch_floats(num_queries, num_positions, self._config.head_dim)


class Scratch:
    """Memory of a team's threads, each its own."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, 0)

    def reserve(self, team: Team, num_floats: int) -> None:
        """Gives each thread so many floats behind what products take."""
        needed = SCRATCH_HEADER + num_floats
        if needed > self._memory.shape[1]:
            # Twice as much, so that a growing sequence does not ask for more in each step; whole cache lines apart.
            self._memory = torch.empty(team.num_threads, -(-2 * needed // 64) * 64)
            team.words[Word.SCRATCH], team.words[Word.SCRATCH_BYTES] = self._memory.data_ptr(), 4 * self._memory.shape[1]


def _fill_layer(words: np.ndarray, layer: "LayerWeights") -> list[torch.Tensor]:
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
