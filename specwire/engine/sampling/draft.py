"""Draft tokens with the target's own noise, so that both models mostly draw the same token (design section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwire.engine.sampling.philox import key_to_int64
from specwire.engine.sampling.sampler import SamplerRows, draw_among, sample_rows
from specwire.sampling_params import GREEDY_EPSILON

_NO_TOP_K = 2**31


@dataclass(frozen=True, slots=True)
class DraftSamples:
    """One draft token for each row."""

    token_ids: Tensor  # [R] int64, ids of the target's vocabulary
    probs: Tensor  # [R] float32, the token's probability at the row's temperature (at 1 if greedy); 0 for a bad row


def sample_draft(
    logits: Tensor,
    *,
    temperatures: Sequence[float],
    keys: Sequence[int],
    indices: Sequence[int],
    choices: Sequence[int],
    target_ids: Tensor | None = None,
    target_vocab_size: int | None = None,
) -> DraftSamples:
    """Draw argmax of z + T * g with the noise of the target's token at the same index; T < 1e-5 takes the argmax.

    Of the request's parameters only the temperature counts: filters and penalties are the target's.

    Args:
        logits: [R, V] float32 of the draft model. Not modified.
        temperatures, keys, indices, choices: [R]; keys are unsigned 64-bit, indices absolute (the first draft of a
            sequence with n committed tokens has index n).
        target_ids: [V] int64, the target's id of each column, for a head with a vocabulary of its own; None = the same.
        target_vocab_size: vocabulary of the target, with target_ids.
    """
    if target_ids is not None:
        assert target_vocab_size is not None, "target_ids without target_vocab_size"
        logits = logits.new_full((len(logits), target_vocab_size), -torch.inf).index_copy_(1, target_ids, logits)
    rows = _rows(logits.device, temperatures, keys, indices, choices)
    sampled = sample_rows(logits, rows)
    scaled = logits / torch.where(rows.temperatures > 0, rows.temperatures, 1.0).unsqueeze(1)  # [R, V]
    probs = (scaled.gather(1, sampled.token_ids.unsqueeze(1)).squeeze(1) - scaled.logsumexp(dim=1)).exp()
    return DraftSamples(sampled.token_ids, probs.masked_fill(sampled.is_bad, 0.0))


def sample_draft_among(
    token_ids: Tensor, logits: Tensor, *, temperatures: Sequence[float], keys: Sequence[int], indices: Sequence[int], choices: Sequence[int]
) -> DraftSamples:
    """As `sample_draft` where all logits but those of a few tokens are -inf.

    Args:
        token_ids: [R, m] int64, the target's ids, different ones in a row.
        logits: [R, m] float32.
        temperatures, keys, indices, choices: [R].
    """
    rows = _rows(logits.device, temperatures, keys, indices, choices)
    if all(temperature < GREEDY_EPSILON for temperature in temperatures):
        is_best = logits == logits.amax(dim=1, keepdim=True)
        chosen = token_ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(dim=1)
    else:
        chosen = draw_among(token_ids, logits, rows, margins=False).token_ids
    scaled = logits / torch.where(rows.temperatures > 0, rows.temperatures, 1.0).unsqueeze(1)  # [R, m]
    probs = scaled.softmax(dim=1).masked_fill(token_ids != chosen.unsqueeze(1), 0.0).sum(dim=1)
    is_bad = ~logits.amax(dim=1).isfinite()
    return DraftSamples(torch.where(is_bad, token_ids[:, 0], chosen), probs.masked_fill(is_bad, 0.0))


def _rows(device: torch.device, temperatures: Sequence[float], keys: Sequence[int], indices: Sequence[int], choices: Sequence[int]) -> SamplerRows:
    return SamplerRows(
        temperatures=torch.tensor([t if t >= GREEDY_EPSILON else 0.0 for t in temperatures], dtype=torch.float32, device=device),
        top_ks=torch.full((len(keys),), _NO_TOP_K, device=device),
        top_ps=torch.ones(len(keys), dtype=torch.float64, device=device),
        min_ps=torch.zeros(len(keys), dtype=torch.float64, device=device),
        keys=torch.tensor([key_to_int64(key) for key in keys], device=device),
        indices=torch.tensor(indices, device=device),
        choices=torch.tensor(choices, device=device),
    )
