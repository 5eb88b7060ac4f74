"""The tokens that may be sampled: min-p, then top-k, then top-p of softmax(z / T).

Each filter sees only what the ones before it left. Tokens are ordered by falling logit, equal logits by rising id; each
filter keeps a first part of that order, so a row's support is its first `size` tokens:

- min-p keeps tokens whose probability is at least `min_p` times the largest: (z - z_max) / T >= log(min_p);
- top-k keeps the first `top_k` of the survivors;
- top-p keeps the shortest part whose mass, relative to the survivors' mass, is at least `top_p`; never less than one token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specwire.engine.sampling.ordering import top_ordered

_FIRST_CANDIDATES = 128
_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of R rows."""

    temperatures: Tensor  # [R] float32, > 0
    top_ks: Tensor  # [R] int64; a value >= V is off
    top_ps: Tensor  # [R] float64; 1 is off
    min_ps: Tensor  # [R] float64; 0 is off

    def select(self, rows: Tensor) -> "Filters":
        return Filters(self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.min_ps[rows])


@dataclass(frozen=True, slots=True)
class Support:
    """Supports of R rows, padded to the widest."""

    token_ids: Tensor  # [R, m] int64, by falling logit, then rising id
    logits: Tensor  # [R, m] float32; -inf behind the row's support
    sizes: Tensor  # [R] int64, >= 1
    borders: Tensor | None  # [R] float32, distance to the nearest filter border (see `_borders`); only when asked

    def with_rows(self, rows: Tensor, other: "Support") -> "Support":
        """Replace some rows by those of another support."""
        width = max(self.logits.shape[1], other.logits.shape[1])
        token_ids, logits = _pad(self.token_ids, width, 0), _pad(self.logits, width, -torch.inf)
        token_ids[rows], logits[rows] = _pad(other.token_ids, width, 0), _pad(other.logits, width, -torch.inf)
        borders = None
        if self.borders is not None and other.borders is not None:
            borders = self.borders.index_copy(0, rows, other.borders)
        return Support(token_ids, logits, self.sizes.index_copy(0, rows, other.sizes), borders)


def filtered_support(logits: Tensor, filters: Filters, *, with_borders: bool = False, num_candidates: int = _FIRST_CANDIDATES) -> Support:
    """Apply min-p, top-k and top-p.

    Sorting a whole vocabulary is slow and a support is mostly small: only the `num_candidates` best logits are looked at
    first; rows that this does not settle are done again with eight times as many.

    Args:
        logits: [R, V] float32; each row has a finite maximum and no NaN.
    """
    support, settled = _among_best(logits, filters, min(num_candidates, logits.shape[1]), with_borders)
    if bool(settled.all()):
        return support
    rest = (~settled).nonzero().squeeze(1)
    deeper = filtered_support(logits[rest], filters.select(rest), with_borders=with_borders, num_candidates=_GROWTH * num_candidates)
    return support.with_rows(rest, deeper)


def _among_best(logits: Tensor, filters: Filters, num: int, with_borders: bool) -> tuple[Support, Tensor]:
    """The support as far as the `num` best logits show it, and which rows that settles ([R] bool)."""
    vocab_size = logits.shape[1]
    values, token_ids = top_ordered(logits, num)  # [R, m]
    temperatures = filters.temperatures.double().unsqueeze(1)  # [R, 1]
    scaled = (values.double() - values[:, :1].double()) / temperatures  # [R, m], <= 0
    log_min_ps = filters.min_ps.log().unsqueeze(1)  # [R, 1], -inf is off
    ranks = torch.arange(num, device=logits.device)  # [m]

    survives = (values > -torch.inf) & (scaled >= log_min_ps) & (ranks < filters.top_ks.unsqueeze(1))
    num_survivors = survives.sum(dim=1)
    known = (num_survivors < num) | (num == vocab_size)  # no survivor lies behind the candidates

    mass = scaled.exp() * survives
    cumulative = mass.cumsum(dim=1)  # [R, m]
    totals = cumulative[:, -1].clone()
    uses_top_p = filters.top_ps < 1
    # Where survivors lie behind the candidates, top-p still needs only their total mass, if no top-k depends on their order.
    summed = (uses_top_p & ~known & (filters.top_ks >= vocab_size)).nonzero().squeeze(1)
    if len(summed):
        totals[summed] = _survivors_mass(logits[summed], values[summed, :1], temperatures[summed], log_min_ps[summed])
    targets = torch.where(uses_top_p, filters.top_ps * totals, torch.inf).unsqueeze(1)  # [R, 1]
    before = torch.nn.functional.pad(cumulative, (1, 0))[:, :-1]  # mass ahead of each token
    kept = survives & (before < targets)
    sizes = kept.sum(dim=1)
    settled = known.index_fill(0, summed, True) & (known | (sizes < num))

    borders = _borders(scaled, log_min_ps, survives, cumulative / totals.unsqueeze(1), sizes, filters) if with_borders else None
    width = int(sizes.max())
    padded = values.masked_fill(~kept, -torch.inf)
    return Support(token_ids[:, :width], padded[:, :width], sizes, borders), settled


def _survivors_mass(logits: Tensor, maxima: Tensor, temperatures: Tensor, log_min_ps: Tensor) -> Tensor:
    """Sum of exp((z - z_max) / T) over the tokens that min-p keeps, [R] float64."""
    scaled = (logits - maxima) / temperatures.float()  # [R, V]
    return scaled.exp().masked_fill_(scaled < log_min_ps, 0.0).sum(dim=1, dtype=torch.float64)


def _borders(scaled: Tensor, log_min_ps: Tensor, survives: Tensor, shares: Tensor, sizes: Tensor, filters: Filters) -> Tensor:
    """How far the nearest filter border is, [R] float32: the least of

    - |(z - z_max) / T - log(min_p)| over the candidates;
    - the step of z / T across the last token that top-k keeps, and across the last that top-p keeps;
    - |share of the mass - top_p| over the first parts that top-p may keep.

    Infinite for a filter that is off or cuts nothing.
    """
    num = scaled.shape[1]
    steps = scaled[:, :-1] - scaled[:, 1:]  # [R, m - 1]
    cut_by_k = torch.arange(1, num, device=scaled.device) == filters.top_ks.unsqueeze(1)
    cut_at_size = torch.arange(1, num, device=scaled.device) == sizes.unsqueeze(1)
    uses_top_p = (filters.top_ps < 1).unsqueeze(1)
    distances = torch.cat(
        [
            (scaled - log_min_ps).abs(),
            steps.masked_fill(~cut_by_k | (scaled[:, 1:] < log_min_ps), torch.inf),
            steps.masked_fill(~(cut_at_size & uses_top_p & survives[:, 1:]), torch.inf),
            (shares - filters.top_ps.unsqueeze(1)).abs().masked_fill(~(uses_top_p & survives), torch.inf),
        ],
        dim=1,
    )
    return distances.nan_to_num(nan=torch.inf, posinf=torch.inf).amin(dim=1).float()


def _pad(tensor: Tensor, width: int, value: float) -> Tensor:
    """A copy of [R, m] with columns of `value` up to `width`."""
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value).clone()
