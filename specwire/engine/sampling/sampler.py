"""The token of a row: argmax over its support of z + T * g, ties to the lowest id (design section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwire.engine.sampling.ordering import row_max
from specwire.engine.sampling.philox import GUMBEL_MAX, GUMBEL_MIN, Stream, gumbel, key_to_int64, noise_words, noise_words_at
from specwire.engine.sampling.support import Filters, filtered_support
from specwire.sampling_params import SamplingParams

_CPU_CHUNK = 2**17
_DEVICE_CHUNK = 2**24
"""Most noise words made at once; on CPU their intermediate values should stay in the cache."""
_SPARSE_SHARE = 8
"""Noise is made token by token where at most one in this many tokens can win."""


@dataclass(frozen=True, slots=True)
class SampleMargins:
    """How close a sampled token was to being another one.

    Args:
        top2: best minus second-best value of z + T * g over the support (of z if greedy); infinite for a single token.
        border: distance to the nearest filter border, see `support._borders`; infinite without filters.
    """

    top2: float
    border: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may explain another token here (design section 3)."""
        return self.top2 < 1e-4 or self.border < 1e-5


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """What each of R rows of logits is sampled with."""

    temperatures: Tensor  # [R] float32; 0 is greedy
    top_ks: Tensor  # [R] int64; a value >= V is off
    top_ps: Tensor  # [R] float64; 1 is off
    min_ps: Tensor  # [R] float64; 0 is off
    keys: Tensor  # [R] int64, two's complement
    indices: Tensor  # [R] int64, absolute index of the sampled token
    choices: Tensor  # [R] int64

    @classmethod
    def build(
        cls, params: Sequence[SamplingParams], keys: Sequence[int], indices: Sequence[int], choices: Sequence[int], device: torch.device | str = "cpu"
    ) -> "SamplerRows":
        """Rows from parameters, unsigned 64-bit keys, token indices and choices, each [R]."""
        temperatures = [0.0 if p.is_greedy else p.temperature for p in params]
        top_ks = [p.top_k if p.top_k > 0 else 2**31 for p in params]
        return cls(
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            top_ks=torch.tensor(top_ks, dtype=torch.int64, device=device),
            top_ps=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_ps=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
            keys=torch.tensor([key_to_int64(key) for key in keys], dtype=torch.int64, device=device),
            indices=torch.tensor(indices, dtype=torch.int64, device=device),
            choices=torch.tensor(choices, dtype=torch.int64, device=device),
        )

    def select(self, rows: Tensor) -> "SamplerRows":
        """The rows [n] of an index."""
        fields = (self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.keys, self.indices, self.choices)
        return SamplerRows(*(field[rows] for field in fields))

    @property
    def filters(self) -> Filters:
        return Filters(self.temperatures, self.top_ks, self.top_ps, self.min_ps)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Tokens of R rows."""

    token_ids: Tensor  # [R] int64, in [0, V) also for bad rows
    is_bad: Tensor  # [R] bool: a NaN, +inf, or no finite logit
    top2: Tensor | None  # [R] float32, see SampleMargins; only when asked
    borders: Tensor | None  # [R] float32

    @property
    def margins(self) -> list[SampleMargins]:
        """The margins of each row; only where they were asked for."""
        assert self.top2 is not None, "sampled without margins"
        assert self.borders is not None, "sampled without margins"
        return [SampleMargins(*pair) for pair in zip(self.top2.tolist(), self.borders.tolist(), strict=True)]


def sample_greedy(logits: Tensor) -> SampledRows:
    """As `sample_rows` for rows at temperature 0: one argmax.

    Args:
        logits: [R, V] float32, processed.
    """
    best, token_ids = row_max(logits)
    return SampledRows(token_ids, ~best.isfinite(), None, None)


def sample_rows(logits: Tensor, rows: SamplerRows, *, margins: bool = False) -> SampledRows:
    """Sample one token for each row.

    Args:
        logits: [R, V] float32, processed; -inf where a token is not allowed. Not modified.
        margins: also report how close the choice was.
    """
    greedy = sample_greedy(logits)
    borders = torch.full_like(logits[:, 0], torch.inf) if margins else None
    drawn = _Drawn(greedy.token_ids, _gaps(logits) if margins else None, borders)
    draws = (rows.temperatures > 0) & ~greedy.is_bad
    if bool(draws.any()):
        has_filter = (rows.top_ps < 1) | (rows.min_ps > 0) | (rows.top_ks < logits.shape[1])
        for chosen, draw in ((draws & has_filter, _draw_filtered), (draws & ~has_filter, _draw_unfiltered)):
            index = chosen.nonzero().squeeze(1)
            if len(index):
                drawn.put(index, draw(logits if len(index) == len(logits) else logits[index], rows.select(index), margins))
    return SampledRows(drawn.token_ids, greedy.is_bad, drawn.top2, drawn.borders)


@dataclass(frozen=True, slots=True)
class _Drawn:
    token_ids: Tensor  # [n] int64
    top2: Tensor | None  # [n] float32, only when asked
    borders: Tensor | None = None  # [n] float32

    def put(self, index: Tensor, other: "_Drawn") -> None:
        """Overwrite the rows of an index."""
        self.token_ids[index] = other.token_ids
        if self.top2 is not None and other.top2 is not None:
            self.top2[index] = other.top2
        if self.borders is not None and other.borders is not None:
            self.borders[index] = other.borders


def _draw_filtered(logits: Tensor, rows: SamplerRows, margins: bool) -> _Drawn:
    support = filtered_support(logits, rows.filters, with_borders=margins)
    drawn = draw_among(support.token_ids, support.logits, rows, margins)
    return _Drawn(drawn.token_ids, drawn.top2, support.borders)


def _draw_unfiltered(logits: Tensor, rows: SamplerRows, margins: bool) -> _Drawn:
    """Draw from the whole vocabulary. Noise is bounded, so tokens far below the best need none: exact, and faster at low T."""
    num_rows, vocab_size = logits.shape
    cutoffs = logits.amax(dim=1) - rows.temperatures * (GUMBEL_MAX - GUMBEL_MIN) * 1.001  # [n]; a little more for rounding
    can_win = logits >= cutoffs.unsqueeze(1)  # [n, V]
    is_sparse = can_win.sum(dim=1) <= vocab_size // _SPARSE_SHARE
    drawn = _Drawn(logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows) if margins else None)
    sparse = is_sparse.nonzero().squeeze(1)
    if len(sparse):
        drawn.put(sparse, _draw_sparse(logits[sparse], can_win[sparse], rows.select(sparse), margins))
    dense = (~is_sparse).nonzero().squeeze(1)
    if len(dense):
        chunk = max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK) // vocab_size)
        for part in dense.split(chunk):
            drawn.put(part, _draw_dense(logits[part], rows.select(part), margins))
    return drawn


def _draw_dense(logits: Tensor, rows: SamplerRows, margins: bool) -> _Drawn:
    noise = gumbel(noise_words(rows.keys, rows.indices, rows.choices, Stream.TARGET, logits.shape[1]))  # [n, V]
    scores = noise.mul_(rows.temperatures.unsqueeze(1)).add_(logits)
    return _Drawn(row_max(scores)[1], _gaps(scores) if margins else None)


def _draw_sparse(logits: Tensor, can_win: Tensor, rows: SamplerRows, margins: bool) -> _Drawn:
    """As `_draw_dense`, making noise only for the tokens that can win ([n, V] bool)."""
    counts = can_win.sum(dim=1)
    row, token = can_win.nonzero(as_tuple=True)
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    token_ids = row.new_zeros(len(logits), int(counts.max()))  # [n, m]
    values = logits.new_full(token_ids.shape, -torch.inf)
    token_ids[row, column] = token
    values[row, column] = logits[row, token]
    return draw_among(token_ids, values, rows, margins)


def draw_among(token_ids: Tensor, logits: Tensor, rows: SamplerRows, margins: bool) -> _Drawn:
    """Draw from candidates [n, m]; -inf marks padding. Rows of temperature 0 take the best."""
    if token_ids.shape[1] == 1:
        return _Drawn(token_ids[:, 0], torch.full_like(logits[:, 0], torch.inf) if margins else None)
    noise = gumbel(noise_words_at(rows.keys, rows.indices, rows.choices, Stream.TARGET, token_ids))  # [n, m]
    scores = noise.mul_(rows.temperatures.unsqueeze(1)).add_(logits)
    is_best = scores == scores.amax(dim=1, keepdim=True)
    lowest = token_ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(dim=1)
    return _Drawn(lowest, _gaps(scores) if margins else None)


def _gaps(scores: Tensor) -> Tensor:
    """Best minus second-best of each row, [n]; infinite if there is no second."""
    if scores.shape[1] == 1:
        return torch.full_like(scores[:, 0], torch.inf)
    best = scores.topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).nan_to_num(nan=torch.inf)
