"""Which rounds the profile at the start measures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NUM_REPEATS = 5
MIN_REPEATS = 3
"""Differences of fewer repeats are noise."""
_NUM_ROWS = 16
"""Rows whose cost is seen well where rounds are not padded."""


class RoundShape(NamedTuple):
    """A round of num_rows rows, each behind `context` tokens, that share num_tokens tokens evenly."""

    num_tokens: int
    num_rows: int = 1
    context: int = 0

    @property
    def longest_row(self) -> int:
        return -(-self.num_tokens // self.num_rows)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens before the rows' own ones."""
        return self.num_rows * self.context

    def num_blocks(self, block_size: int) -> int:
        """KV blocks of each row."""
        return -(-(self.context + self.longest_row) // block_size)


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """The rounds that there may be.

    Args:
        max_num_seqs: most rows.
        max_row_tokens: K_max + 1.
        max_num_batched_tokens: most tokens.
        max_model_len: most tokens of a row with its context.
        context_len: tokens of context to measure behind, as far as they fit.
        num_blocks, block_size: the KV cache.
        graph_sizes: token counts that rounds without longer rows are padded to; empty where nothing is padded and rows may have any length.
    """

    max_num_seqs: int
    max_row_tokens: int
    max_num_batched_tokens: int
    max_model_len: int
    context_len: int
    num_blocks: int
    block_size: int
    graph_sizes: tuple[int, ...] = ()

    def few_rows(self, num_tokens: int) -> RoundShape:
        """So many tokens in as few rows as may be."""
        longest = self.max_row_tokens if self.graph_sizes else self.max_model_len
        return RoundShape(num_tokens, -(-num_tokens // min(longest, self.max_model_len)))

    def many_rows(self, num_tokens: int) -> RoundShape:
        """So many tokens in as many rows as may be."""
        return RoundShape(num_tokens, min(num_tokens, self.max_num_seqs, self.num_blocks))

    def chunk(self, num_tokens: int) -> RoundShape:
        """So many tokens in rows that are as long as may be."""
        return RoundShape(num_tokens, -(-num_tokens // self.max_model_len))

    def loaded(self, shape: RoundShape) -> RoundShape:
        """The same behind context."""
        room = self.num_blocks // shape.num_rows * self.block_size
        return shape._replace(context=max(0, min(self.context_len, self.max_model_len - shape.longest_row, room - shape.longest_row)))

    def holds(self, shape: RoundShape) -> bool:
        """Whether there are rows and KV blocks for it, and sequences of its length."""
        num_blocks = shape.num_rows * shape.num_blocks(self.block_size)
        return shape.num_rows <= self.max_num_seqs and num_blocks <= self.num_blocks and shape.context + shape.longest_row <= self.max_model_len


class Pair(NamedTuple):
    """Two rounds that differ in one thing."""

    base: RoundShape
    more: RoundShape


@dataclass(frozen=True, slots=True)
class ProfileShapes:
    """What to measure.

    Args:
        sizes: one for each size of the curve, rising.
        chunks: the same of rounds with a row that no graph takes.
        rows, contexts: rounds that differ in their number of rows, or in the context.
        runs: all of them, 5 times each, what is worth most first.
    """

    sizes: Sequence[RoundShape]
    chunks: Sequence[RoundShape]
    rows: Sequence[Pair]
    contexts: Sequence[Pair]
    runs: Sequence[RoundShape]


def profile_shapes(limits: ProfileLimits) -> ProfileShapes:
    """With graphs: every size in as many rows as may be, without and with context, sizes that are powers of two also in as few rows as may be,
    and chunks of 2 x (K_max + 1) tokens and more. Without: one row of each number of tokens that a row with drafts may have, since kernels take
    rows by tiles and the price of one more draft is no smooth curve, of powers of two beyond, and of all that a step without chunks may have; one
    of a token behind context, and 16 rows of a token."""
    return _graph_shapes(limits) if limits.graph_sizes else _plain_shapes(limits)


def _plain_shapes(limits: ProfileLimits) -> ProfileShapes:
    most = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_row_tokens, limits.num_blocks * limits.block_size)
    few = min(limits.max_row_tokens, most, _NUM_ROWS)
    sizes = [limits.few_rows(size) for size in dict.fromkeys([*range(1, few + 1), *_powers_of_two(few, most), most])]
    many = limits.many_rows(min(_NUM_ROWS, 1 << (most.bit_length() - 1)))
    rows = _pairs([(limits.few_rows(many.num_tokens), many)])
    contexts = _pairs([(sizes[0], limits.loaded(sizes[0]))])
    slopes = _once([sizes[0], *(shape for pair in (*contexts, *rows) for shape in pair)], limits)
    small = [shape for shape in _once(sizes, limits) if shape not in slopes and shape.num_tokens < _NUM_ROWS]
    large = [shape for shape in _once(sizes, limits) if shape not in slopes and shape not in small]
    # Small ones and slopes go first on a slow machine. Repeats are spread, so that a slow spell of it does not hit one shape alone.
    runs = slopes + small + slopes * (MIN_REPEATS - 1) + large
    runs += (slopes + small + large) * (_NUM_REPEATS - MIN_REPEATS) + (small + large) * (MIN_REPEATS - 1)
    return ProfileShapes(sizes, (), rows, contexts, runs)


def _graph_shapes(limits: ProfileLimits) -> ProfileShapes:
    sizes = [shape for shape in map(limits.many_rows, limits.graph_sizes) if shape.longest_row <= limits.max_row_tokens]
    coarse = [shape for shape in sizes if shape.num_tokens & (shape.num_tokens - 1) == 0 or shape == sizes[-1]]
    rows = _pairs((limits.few_rows(shape.num_tokens), shape) for shape in coarse)
    contexts = _pairs((shape, limits.loaded(shape)) for shape in sizes)
    chunk_sizes = dict.fromkeys([*_powers_of_two(2 * limits.max_row_tokens, limits.max_num_batched_tokens), limits.max_num_batched_tokens])
    chunks = [shape for shape in map(limits.chunk, chunk_sizes) if shape.longest_row > limits.max_row_tokens]
    # A few sizes say nearly everything of what context adds. Repeats are together: another shape needs another block table.
    order = [*sizes, *map(limits.loaded, coarse), *(pair.base for pair in rows), *chunks, *(pair.more for pair in contexts)]
    return ProfileShapes(sizes, chunks, rows, contexts, [shape for shape in _once(order, limits) for _ in range(_NUM_REPEATS)])


def _powers_of_two(first: int, last: int) -> list[int]:
    """Those from `first` on, up to `last`."""
    return [1 << i for i in range((first - 1).bit_length(), last.bit_length())]


def _pairs(pairs: Iterable[tuple[RoundShape, RoundShape]]) -> list[Pair]:
    return [Pair(base, more) for base, more in pairs if base != more]


def _once(shapes: Iterable[RoundShape], limits: ProfileLimits) -> list[RoundShape]:
    return [shape for shape in dict.fromkeys(shapes) if limits.holds(shape)]
