"""Calls of a head that drafts token by token over tiled weights, each one job after another of a team of threads."""

from collections.abc import Sequence

import numpy as np
import torch

from specwire.engine.cpu.byte_drafts import enter_drafts
from specwire.engine.cpu.draft_choice import CHOICE_SCRATCH
from specwire.engine.cpu.draft_job import DraftWord, SequenceWord
from specwire.engine.cpu.draft_noise import NoisePlan
from specwire.engine.cpu.job import NUM_PHASES, LayerWord, Word
from specwire.engine.cpu.layers import FEW_PIECES, FEW_ROWS, MANY_PIECES, ROWS_PER_PIECE, Layers, Scratch
from specwire.engine.cpu.linear import TiledHead
from specwire.engine.cpu.team import Team
from specwire.engine.cpu.tiles import GROUP, MAX_ROWS, ROWS_BYTES
from specwire.engine.cpu.weights import FEATURES
from specwire.engine.graphs.draft_runner import DraftTokens
from specwire.engine.graphs.draft_upload import DraftRow, DraftSampling
from specwire.engine.heads.eagle3 import Eagle3Weights
from specwire.engine.heads.vocabulary import Vocabulary
from specwire.engine.models.config import ModelConfig
from specwire.engine.sampling.philox import key_to_int64
from specwire.sampling_params import GREEDY_EPSILON


class TiledDrafts:
    """Layers, output layer and noise of one head, on as many threads as torch has when the first call comes.

    Args:
        config: shape of the layers.
        weights: products are `ByteLinear`s.
        vocabulary: the output layer is a `TiledHead`.
        kv_layers: a layer each, bfloat16 [num_blocks, block_size, 2, num_kv_heads, head_dim].
        max_num_drafts: of a sequence.
    """

    def __init__(
        self, config: ModelConfig, weights: Eagle3Weights, vocabulary: Vocabulary, kv_layers: Sequence[torch.Tensor], max_num_drafts: int
    ) -> None:
        output = vocabulary.head.linear
        assert isinstance(output, TiledHead), f"the output layer is a {type(output)}"
        self._config, self._max_num_drafts, self._output = config, max_num_drafts, output
        self._layers = Layers(config, weights.layers, weights.final_norm.float(), weights.cos, weights.signed_sin)
        self._layers.table[:, LayerWord.KV] = [layer.data_ptr() for layer in kv_layers]
        self._layers.table[0, LayerWord.IS_FIRST] = 1
        self._parts = np.zeros(NUM_PHASES, dtype=np.int64)
        for phase, width in self._layers.widths.items():
            self._parts[phase] = width // FEATURES
        ids = vocabulary.target_ids
        self._noise = NoisePlan.make(np.arange(vocabulary.num_drafted) if ids is None else ids.numpy())
        self._block_size = kv_layers[0].shape[1]
        self._weights, self._embedding = weights, vocabulary.embedding
        self._hidden_norm, self._kv_layers = weights.hidden_norm.float(), kv_layers
        self._words = np.zeros(DraftWord.COUNT, dtype=np.int64)
        self._team: Team | None = None
        self._row_buffers: dict[Word | DraftWord, torch.Tensor] = {}
        self._sequence_buffers: dict[Word | DraftWord, torch.Tensor] = {}
        self._num_rows = self._num_sequences = 0
        self._scratch = Scratch()

    @property
    def num_passes(self) -> int:
        """Passes of the last call."""
        return max(1, int(self._words[DraftWord.NUM_PASSES]))

    def run(self, rows: Sequence[DraftRow], sampling: Sequence[DraftSampling] = ()) -> list[DraftTokens]:
        """Writes KV of rows and drafts behind them.

        Args:
            rows: with features of all their tokens; either all want drafts, or none does.
            sampling: of the rows, with drafts.
        """
        words, counts = self._words, [len(row.token_ids) for row in rows]
        num_rows, num_passes = sum(counts), max(row.num_drafts for row in rows)
        assert num_passes <= self._max_num_drafts, f"{num_passes} drafts of at most {self._max_num_drafts}"
        self._prepare(num_rows, len(rows))
        tables = [np.array(row.block_table, dtype=np.int64) for row in rows]
        sequences = np.zeros((len(rows), SequenceWord.COUNT), dtype=np.int64)
        first, end = 0, 0
        for index, (row, count, table) in enumerate(zip(rows, counts, tables, strict=True)):
            key, choice = (key_to_int64(sampling[index].key), sampling[index].choice) if sampling else (0, 0)
            sequences[index] = first, count, row.start_position, table.ctypes.data, row.num_drafts, key, choice
            first, end = first + count, max(end, row.start_position + count + row.num_drafts)
        self._reserve_scratch(end)
        temperatures = np.array([one.temperature if one.temperature >= GREEDY_EPSILON else 0.0 for one in sampling], dtype=np.float32)
        features = torch.cat([_features(row) for row in rows]).float()
        self._row_buffers[DraftWord.TOKENS][:num_rows] = torch.tensor([token for row in rows for token in row.token_ids])
        words[DraftWord.NUM_SEQUENCES], words[DraftWord.NUM_PASSES] = len(rows), num_passes
        words[DraftWord.SEQUENCES], words[DraftWord.TEMPERATURES] = sequences.ctypes.data, temperatures.ctypes.data
        words[DraftWord.FEATURES] = features.data_ptr()
        assert self._team is not None, "the words are a team's"
        self._team.run()
        if not num_passes:
            return []
        shape = len(rows), num_passes
        ids, probs = (
            self._sequence_buffers[word].view(-1)[: shape[0] * shape[1]].view(shape).tolist() for word in (DraftWord.DRAFTS, DraftWord.PROBS)
        )
        return [DraftTokens(own[: row.num_drafts], scores[: row.num_drafts]) for row, own, scores in zip(rows, ids, probs, strict=True)]

    def _prepare(self, num_rows: int, num_sequences: int) -> None:
        """Makes the team, and buffers for so many rows and sequences."""
        if self._team is None:
            self._team = Team(torch.get_num_threads(), enter_drafts)
            self._fill_constants(self._team.words)
        if num_rows > self._num_rows:
            self._num_rows = num_rows
            self._row_buffers = self._make_row_buffers(num_rows)
            self._place(self._row_buffers)
        if num_sequences > self._num_sequences:
            self._num_sequences = num_sequences
            self._sequence_buffers = self._make_sequence_buffers(num_sequences)
            self._place(self._sequence_buffers)

    def _place(self, buffers: dict[Word | DraftWord, torch.Tensor]) -> None:
        assert self._team is not None, "the words are a team's"
        for word, buffer in buffers.items():
            (self._words if isinstance(word, DraftWord) else self._team.words)[word] = buffer.data_ptr()

    def _make_row_buffers(self, num_rows: int) -> dict[Word | DraftWord, torch.Tensor]:
        config = self._config
        hidden, inner, heads_width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        tiles, widest = -(-num_rows // MAX_ROWS), max(2 * hidden, inner, heads_width)
        buffers: dict[Word | DraftWord, torch.Tensor] = dict(self._layers.row_buffers(num_rows).items())
        return buffers | {
            Word.RESIDUAL: torch.empty(num_rows, hidden),
            Word.NORMED: torch.empty(num_rows, 2 * hidden),
            Word.POSITIONS: torch.empty(num_rows, dtype=torch.int64),
            Word.SLOTS: torch.empty(num_rows, dtype=torch.int64),
            Word.ROW_GROUPS: torch.empty(num_rows, 3, dtype=torch.int64),
            DraftWord.TOKENS: torch.empty(num_rows, dtype=torch.int64),
            DraftWord.FEATURE_AT: torch.empty(num_rows, dtype=torch.int64),
            Word.DIGITS: torch.empty(tiles, 2 * (widest // GROUP) * ROWS_BYTES, dtype=torch.int8),
            Word.UNITS: torch.empty(num_rows),
            Word.CORRECTIONS: torch.empty(num_rows, 2, dtype=torch.int32),
        }

    def _make_sequence_buffers(self, num_sequences: int) -> dict[Word | DraftWord, torch.Tensor]:
        return {
            Word.OUT: torch.zeros(num_sequences, FEATURES * self._output.num_blocks),
            Word.EXACT: torch.empty(num_sequences, len(self._output.columns)),
            DraftWord.CARRY: torch.empty(num_sequences, self._config.hidden_size),
            DraftWord.OUTPUTS: torch.empty(num_sequences, 2, dtype=torch.int64),
            DraftWord.DRAFTS: torch.empty(num_sequences, self._max_num_drafts, dtype=torch.int64),
            DraftWord.PROBS: torch.empty(num_sequences, self._max_num_drafts),
        }

    def _reserve_scratch(self, num_positions: int) -> None:
        assert self._team is not None, "the threads are a team's"
        of_choice = CHOICE_SCRATCH + FEATURES * self._output.num_blocks
        self._scratch.reserve(self._team, max(of_choice, self._layers.num_scratch_floats(num_positions)))

    def _fill_constants(self, words: np.ndarray) -> None:
        weights, noise = self._weights, self._noise
        for word, value in {
            **self._layers.constants(),
            Word.BLOCK_SIZE: self._block_size,
            Word.DRAFT: self._words.ctypes.data,
            Word.HEAD_BLOCKS: self._output.num_blocks,
            Word.HEAD: self._output.weight.data_ptr(),
            Word.NUM_EXACT: len(self._output.columns),
        }.items():
            words[word] = value
        for draft_word, value in {
            DraftWord.ROWS_PER_GROUP: self._layers.rows_per_group,
            DraftWord.FEW_ROWS: FEW_ROWS,
            DraftWord.ROWS_PER_PIECE: ROWS_PER_PIECE,
            DraftWord.FEW_PIECES: FEW_PIECES,
            DraftWord.MANY_PIECES: MANY_PIECES,
            DraftWord.PARTS: self._parts.ctypes.data,
            DraftWord.HEAD_PARTS: self._output.num_blocks,
            DraftWord.EMBEDDING: self._embedding.data_ptr(),
            DraftWord.HIDDEN_NORM: self._hidden_norm.data_ptr(),
            DraftWord.IS_NORM_RESIDUAL: weights.norm_before_residual,
            DraftWord.IS_NORM_CARRIED: weights.norm_output,
            DraftWord.EXACT_COLUMNS: self._output.columns.data_ptr(),
            DraftWord.NUM_IDS: len(noise.ids),
            DraftWord.ROW_WIDTH: FEATURES * self._output.num_blocks,
            DraftWord.TARGET_IDS: noise.ids.ctypes.data,
            DraftWord.NUM_GROUPS: len(noise.blocks),
            DraftWord.NOISE_BLOCKS: noise.blocks.ctypes.data,
            DraftWord.GROUP_STARTS: noise.starts.ctypes.data,
            DraftWord.NOISE_COLUMNS: noise.columns.ctypes.data,
        }.items():
            self._words[draft_word] = value


def _features(row: DraftRow) -> torch.Tensor:
    assert row.features is not None, f"{row} has no features"
    first = row.start_position - row.features_start
    return row.features[first : first + len(row.token_ids)]
