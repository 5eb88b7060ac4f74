"""What DSpark adds to a block: a low-rank bias of a draft by the token before it, and confidences."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

_GROUP = 16
"""Columns that are looked at together for the highest logits."""


class Candidates(NamedTuple):
    """Ids that may be drafted in each row."""

    columns: torch.Tensor | None  # [R, m] int64, of the head's output; None = all of them
    logits: torch.Tensor  # [R, m] float32


class Markov:
    """What a draft's logits gain by the token before it: w2 w1[previous].

    Args:
        w1: [target's vocab_size, rank].
        w2: [draft_vocab_size, rank].
        top_k: only so many ids of the highest logits get the bias, and all others are left out; 0 = all ids.
    """

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor, top_k: int) -> None:
        self.w1 = w1
        self._w2 = w2.float()
        self._top_k = top_k if top_k < len(w2) else 0

    def candidates(self, logits: torch.Tensor) -> Candidates:
        """Which of logits [R, draft_vocab_size] are looked at."""
        if not self._top_k:
            return Candidates(None, logits)
        return highest(logits, self._top_k)

    def biased(self, candidates: Candidates, previous: torch.Tensor) -> torch.Tensor:
        """The candidates' logits [R, m] for rows that follow the target's ids previous [R]."""
        states = F.embedding(previous, self.w1).float()  # [R, rank]
        if candidates.columns is None:
            return torch.addmm(candidates.logits, states, self._w2.t())
        return candidates.logits + torch.einsum("rmk,rk->rm", self._w2[candidates.columns], states)


class Confidence:
    """How likely a draft is to be accepted, once those before it are: sigmoid(linear(hidden, w1[previous]) / temperature).

    Args:
        weight: [hidden_size] or [hidden_size + rank].
        bias: of the linear function.
        markov: gives w1 where weight has a part for it.
        temperatures: by position, from sequential temperature scaling; positions behind the last have its temperature, none = 1.
    """

    def __init__(self, weight: torch.Tensor, bias: float, markov: Markov | None, temperatures: tuple[float, ...]) -> None:
        self._weight = weight.float()
        self._bias = bias
        self._markov = markov
        self._temperatures = temperatures or (1.0,)

    def __call__(self, hidden: torch.Tensor, previous: torch.Tensor, position: int) -> torch.Tensor:
        """Probabilities [R] of rows [R, hidden_size] that follow the target's ids previous [R]; position counts drafts from 0."""
        rows = hidden.float()
        if self._markov is not None:
            rows = torch.cat((rows, F.embedding(previous, self._markov.w1).float()), -1)
        temperature = self._temperatures[min(position, len(self._temperatures) - 1)]
        return torch.sigmoid((rows @ self._weight + self._bias) / temperature)


def highest(logits: torch.Tensor, count: int) -> Candidates:
    """The `count` highest of each row: they lie in the `count` groups with the highest bests, so that most columns are only looked at once."""
    num_rows, size = logits.shape
    if size < _GROUP * count:
        best, columns = logits.topk(count, dim=1)
        return Candidates(columns, best)
    padded = F.pad(logits, (0, -size % _GROUP), value=-torch.inf) if size % _GROUP else logits
    groups = padded.view(num_rows, -1, _GROUP)
    chosen = groups.amax(2).topk(count, dim=1).indices  # [R, count]
    values = groups.gather(1, chosen.unsqueeze(2).expand(-1, -1, _GROUP)).flatten(1)  # [R, count * _GROUP]
    best, places = values.topk(count, dim=1)
    return Candidates(chosen.gather(1, places // _GROUP) * _GROUP + places % _GROUP, best)
