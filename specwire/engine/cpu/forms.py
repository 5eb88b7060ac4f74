"""The forms that weights of tiled passes are kept in: what `TiledForward` must know of each."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from specwire.engine.cpu.byte_linear import ByteLinear
from specwire.engine.cpu.half_linear import HalfLinear
from specwire.engine.cpu.half_tiles import FEATURES as HALF_FEATURES
from specwire.engine.cpu.job import FINE_WORDS, Word
from specwire.engine.cpu.linear import TiledHead, TiledLinear
from specwire.engine.cpu.tiles import GROUP, MAX_ROWS, NUMBERS_BYTES, ROWS_BYTES
from specwire.engine.cpu.weights import FEATURES
from specwire.engine.kernels.linear import Linear
from specwire.engine.models.config import ModelConfig
from specwire.errors import UnsupportedError

Enter = Callable[[int, int, int], None]
"""A thread's loop: addresses of job and semaphore, number of the thread."""


class Form(Protocol):
    """Of all layers and the head of one model."""

    head_features: int
    """Of a row of logits, with those that no token has."""
    vocab_size: int

    def enter(self) -> Enter:
        """Compiled where it is not yet."""
        ...

    def num_parts(self, features: int, *, is_gated: bool = False) -> int:
        """Into which a product can be divided; features of gate alone, if gated."""
        ...

    def constants(self) -> dict[Word, int]:
        """Of the head."""
        ...

    def make_buffers(self, num_rows: int, widest: int) -> dict[Word, torch.Tensor]:
        """What rows are prepared in, up to widest numbers each."""
        ...

    def take_head_input(self, words: np.ndarray, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Fills in what the head reads of rows beside the rows; returns what must live as long."""
        ...


def form_of(config: ModelConfig, head: Linear | None) -> Form:
    """The form that the linear layers of a model with this head have.

    Raises:
        UnsupportedError: no tiled pass for the model's shape.
    """
    if isinstance(head, HalfLinear):
        return HalfForm(head)
    assert isinstance(head, TiledHead), f"the head is a {type(head)}"
    widest, limit = widest_row(config), 64 * FINE_WORDS * GROUP
    if widest > limit:
        raise UnsupportedError(f"a layer of {widest} numbers can't be computed in 4 bits here: the limit is {limit}; take --weights bf16")
    return Q4Form(head)


def widest_row(config: ModelConfig) -> int:
    """Numbers of the widest row that a product reads."""
    return max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)


def tiled(linear: Linear) -> TiledLinear | HalfLinear | ByteLinear:
    """A layer's product, which a tiled model has in one of these classes."""
    assert isinstance(linear, TiledLinear | HalfLinear | ByteLinear), f"a layer's product is a {type(linear)}"
    return linear


class Q4Form:
    """Layers in 4 bits, head in 8."""

    def __init__(self, head: TiledHead) -> None:
        self._head = head
        self.vocab_size, self.head_features = head.vocab_size, FEATURES * head.num_blocks

    def enter(self) -> Enter:
        from specwire.engine.cpu.q4_work import enter_q4  # compiles

        return enter_q4

    def num_parts(self, features: int, *, is_gated: bool = False) -> int:
        return features // FEATURES

    def constants(self) -> dict[Word, int]:
        return {Word.HEAD_BLOCKS: self._head.num_blocks, Word.HEAD: self._head.weight.data_ptr(), Word.NUM_EXACT: len(self._head.columns)}

    def make_buffers(self, num_rows: int, widest: int) -> dict[Word, torch.Tensor]:
        tiles = -(-num_rows // MAX_ROWS)
        return {
            Word.DIGITS: torch.empty(tiles, 2 * (widest // GROUP) * ROWS_BYTES, dtype=torch.int8),
            Word.NUMBERS: torch.empty(tiles, widest // GROUP * NUMBERS_BYTES, dtype=torch.int8),
            Word.UNITS: torch.empty(num_rows),
            Word.FINE: torch.empty(num_rows, FINE_WORDS, dtype=torch.int64),
            Word.CORRECTIONS: torch.empty(num_rows, 2, dtype=torch.int32),
        }

    def take_head_input(self, words: np.ndarray, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        exact = hidden.index_select(1, self._head.columns)
        words[Word.EXACT] = exact.data_ptr()
        return (exact,)


class HalfForm:
    """Layers and head in float16 tiles."""

    def __init__(self, head: HalfLinear) -> None:
        self._head = head
        self.vocab_size = self.head_features = head.out_features

    def enter(self) -> Enter:
        from specwire.engine.cpu.half_work import enter_half  # compiles

        return enter_half

    def num_parts(self, features: int, *, is_gated: bool = False) -> int:
        return features // HALF_FEATURES if is_gated else -(-features // (2 * HALF_FEATURES))

    def constants(self) -> dict[Word, int]:
        return {Word.HEAD_FEATURES: self.head_features, Word.HEAD: self._head.weight.data_ptr()}

    def make_buffers(self, num_rows: int, widest: int) -> dict[Word, torch.Tensor]:
        return {Word.HALVES: torch.empty(num_rows, widest, dtype=torch.int32), Word.UNITS: torch.empty(num_rows)}

    def take_head_input(self, words: np.ndarray, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        return ()
