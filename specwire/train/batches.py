"""Batches of sequences with the target's hidden states, and in which order they are trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.train.data import Sequences
from specwire.train.target import Target, free_bytes

_FEATURE_TOKENS = 65_536
_KEEP_SHARE = 0.6
_CPU_KEEP_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences padded at the right to L tokens."""

    tokens: torch.Tensor  # [B, L] int64, 0 behind the end
    lengths: torch.Tensor  # [B] int64
    prompt_lens: torch.Tensor  # [B] int64
    is_greedy: torch.Tensor  # [B] bool
    features: torch.Tensor  # [B, L, F * hidden_size]
    final: torch.Tensor  # [B, L, hidden_size]
    longest_answer: int  # tokens


def plan_batches(lengths: np.ndarray, max_tokens: int, pad_to: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Divides sequences of about equal lengths into batches of at most max_tokens tokens with padding (or one sequence), in random order."""
    order = np.argsort(lengths * rng.uniform(0.9, 1.1, len(lengths)), kind="stable")
    batches: list[list[int]] = [[]]
    longest = 0
    for row in order.tolist():
        padded = padded_length(max(longest, int(lengths[row])), pad_to)
        if batches[-1] and padded * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = 0
        batches[-1].append(row)
        longest = max(longest, int(lengths[row]))
    return [np.array(batches[index]) for index in rng.permutation(len(batches))]


def padded_length(length: int, pad_to: int) -> int:
    """The next multiple of pad_to."""
    return -(-length // pad_to) * pad_to


class BatchSource:
    """Makes batches; keeps all hidden states on the target's device if they take at most three fifths of what is free there, else computes each anew.

    Args:
        target: the model.
        sequences: prompts and answers.
        feature_layers: see `specwire.train.recipe.Recipe`.
    """

    def __init__(self, target: Target, sequences: Sequences, feature_layers: Sequence[int]) -> None:
        self.sequences, self._target, self._feature_layers = sequences, target, tuple(feature_layers)
        self.pad_to = 64 if target.device.type == "cuda" else 16
        self._tokens = torch.from_numpy(sequences.tokens.astype(np.int64)).to(target.device)
        # On the device, as what a batch sends there makes the host wait for the batch before.
        self._starts, self._lengths, self._prompt_lens, self._is_greedy = (
            torch.from_numpy(array).to(target.device) for array in (sequences.starts, sequences.lengths, sequences.prompt_lens, sequences.is_greedy)
        )
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all hidden states."""
        return len(self._tokens) * (len(self._feature_layers) + 1) * self._target.config.hidden_size * self._target.dtype.itemsize

    @property
    def fits(self) -> bool:
        """Whether they may be kept."""
        device = self._target.device
        return self.num_bytes <= (free_bytes(device) * _KEEP_SHARE if device.type == "cuda" else _CPU_KEEP_BYTES)

    @property
    def is_kept(self) -> bool:
        """Whether `keep` has been called."""
        return self._kept is not None

    def keep(self, on_batch: Callable[[int, int], None]) -> None:
        """Computes all hidden states once.

        Args:
            on_batch: called with (tokens done, tokens in all); it may raise to stop.
        """
        target, sequences = self._target, self.sequences
        shape = (len(self._tokens), target.config.hidden_size)
        features = torch.empty((shape[0], shape[1] * len(self._feature_layers)), dtype=target.dtype, device=target.device)
        final = torch.empty(shape, dtype=target.dtype, device=target.device)
        num_done = 0
        for rows in plan_batches(sequences.lengths, _FEATURE_TOKENS, self.pad_to, np.random.default_rng(0)):
            index, is_token = self._index(rows)
            hidden = target.hidden(torch.where(is_token, self._tokens[index], 0), self._feature_layers)
            places = index[is_token]
            features[places], final[places] = hidden.features[is_token], hidden.final[is_token]
            num_done += len(places)
            on_batch(num_done, len(self._tokens))
        self._kept = features, final

    def batch(self, rows: np.ndarray) -> Batch:
        """The batch of these sequences."""
        index, is_token = self._index(rows)
        chosen, sequences = torch.from_numpy(rows).to(self._target.device), self.sequences
        tokens = torch.where(is_token, self._tokens[index], 0)
        if self._kept is not None:
            features, final = (kept[index] for kept in self._kept)
        else:
            hidden = self._target.hidden(tokens, self._feature_layers)
            features, final = hidden.features, hidden.final
        longest = int((sequences.lengths[rows] - sequences.prompt_lens[rows]).max())
        return Batch(tokens, self._lengths[chosen], self._prompt_lens[chosen], self._is_greedy[chosen], features, final, longest)

    def _index(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the tokens of each sequence are, [B, L], and which of them are its own."""
        device = self._target.device
        chosen = torch.from_numpy(rows).to(device)
        starts, lengths = self._starts[chosen][:, None], self._lengths[chosen][:, None]
        columns = torch.arange(padded_length(int(self.sequences.lengths[rows].max()), self.pad_to), device=device)
        return starts + torch.minimum(columns, lengths - 1), columns < lengths
