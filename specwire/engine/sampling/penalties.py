"""Repetition, presence and frequency penalties, from counts that grow with the sequence."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specwire.sampling_params import SamplingParams

_SPARE_CAPACITY = 256


class TokenCounts:
    """The ids that a sequence has seen and how often it generated each; as tensors, so that a row need not build them.

    Args:
        counts: how often each id was generated so far, 0 for one that only the prompt has.
        device: where the logits will be.
    """

    def __init__(self, counts: Mapping[int, int], device: torch.device | str) -> None:
        unused = [0] * max(_SPARE_CAPACITY, len(counts))
        self._added: list[int] = []
        self._column = {token_id: column for column, token_id in enumerate(counts)}
        self._token_ids = torch.tensor([*counts, *unused], dtype=torch.int64, device=device)
        self._counts = torch.tensor([*counts.values(), *unused], dtype=torch.float32, device=device)

    def add(self, token_ids: Iterable[int]) -> None:
        """Count generated tokens. Cheap: where a device counts for itself, nobody ever asks for the result."""
        self._added.extend(token_ids)

    def _count_added(self) -> None:
        for token_id in self._added:
            column = self._column.setdefault(token_id, len(self._column))
            if column == len(self._counts):
                self._token_ids = torch.cat([self._token_ids, torch.zeros_like(self._token_ids)])
                self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._token_ids[column] = token_id
            self._counts[column] += 1
        self._added.clear()

    def with_drafts(self, draft_ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Counts at each row of a segment, whose row j comes after the first j drafts.

        Returns:
            token_ids [n] int64: seen, or among the drafts; counts [1 + num_drafts, n] float32; is_seen [1 + num_drafts, n] bool.
        """
        self._count_added()
        num_seen = len(self._column)
        new_ids = [token_id for token_id in dict.fromkeys(draft_ids) if token_id not in self._column]
        column = {token_id: num_seen + i for i, token_id in enumerate(new_ids)}
        device = self._counts.device
        increments = torch.zeros(1 + len(draft_ids), num_seen + len(new_ids))
        for row, draft_id in enumerate(draft_ids, start=1):
            increments[row:, column[draft_id] if draft_id in column else self._column[draft_id]] += 1
        counts = increments.to(device)
        counts[:, :num_seen] += self._counts[:num_seen]
        is_seen = counts > 0
        is_seen[:, :num_seen] = True
        token_ids = torch.cat([self._token_ids[:num_seen], torch.tensor(new_ids, dtype=torch.int64, device=device)])
        return token_ids, counts, is_seen


def penalise(logits: Tensor, seen: TokenCounts, params: SamplingParams, draft_ids: Sequence[int]) -> None:
    """Repetition penalty over prompt and output (positive logits divided, others multiplied: Keskar et al. 2019, CTRL),
    then frequency x count and presence over the output alone. In place.

    Args:
        logits: [1 + num_drafts, V] float32.
    """
    token_ids, counts, is_seen = seen.with_drafts(draft_ids)
    values = logits[:, token_ids]  # [1 + num_drafts, n]
    if params.repetition_penalty != 1.0:
        penalised = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values = torch.where(is_seen, penalised, values)
    logits[:, token_ids] = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
