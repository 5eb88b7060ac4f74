"""Single products in float16 tiles, shared among threads."""

import numpy as np
import torch

from specwire.engine.cpu.half_linear import HalfLinear
from specwire.engine.cpu.half_tiles import FEATURES, MAX_ROWS, TILE_BYTES
from specwire.engine.cpu.half_work import enter_half
from specwire.engine.cpu.job import NUM_PHASES, Word
from specwire.engine.cpu.team import Team

_PIECES = 8
"""Of a product, for each thread."""
_SCRATCH_FLOATS = MAX_ROWS * TILE_BYTES // 4


class HalfTeam:
    """Multiplies with any `HalfLinear` on num_threads threads, of which the caller is one; the bits are those of a call of the layer itself.

    Not thread-safe: one thread owns it.
    """

    def __init__(self, num_threads: int) -> None:
        self._team = Team(num_threads, enter_half)
        self._scratch = torch.empty(num_threads, _SCRATCH_FLOATS)
        words = self._team.words
        words[Word.IS_HEAD] = 1
        words[Word.SCRATCH], words[Word.SCRATCH_BYTES] = self._scratch.data_ptr(), 4 * _SCRATCH_FLOATS

    def multiply(self, linear: HalfLinear, x: torch.Tensor) -> torch.Tensor:
        """Float32 x [T, in_features] -> float32 [T, out_features]."""
        num_rows, width = x.shape
        assert width == linear.in_features, f"rows of {width} numbers, and a weight of {linear.in_features}"
        rows, out = x.contiguous(), torch.empty(num_rows, linear.out_features)
        halves, units = torch.empty(num_rows, width, dtype=torch.int32), torch.empty(num_rows)
        words, parts = self._team.words, -(-linear.out_features // (2 * FEATURES))
        for word, value in {
            Word.NUM_ROWS: num_rows,
            Word.HIDDEN: width,
            Word.HEAD_FEATURES: linear.out_features,
            Word.HEAD: linear.weight.data_ptr(),
            Word.NORMED: rows.data_ptr(),
            Word.HALVES: halves.data_ptr(),
            Word.UNITS: units.data_ptr(),
            Word.OUT: out.data_ptr(),
        }.items():
            words[word] = value
        counts = [min(num_rows, self._team.num_threads), min(parts, _PIECES * self._team.num_threads)] + [0] * (NUM_PHASES - 2)
        starts = np.cumsum([0, *counts])
        words[Word.STARTS : Word.STARTS + NUM_PHASES + 1] = starts
        words[Word.PER_LAYER] = words[Word.TOTAL] = starts[-1]
        self._team.run()
        return out if linear.float_bias is None else out.add_(linear.float_bias)
