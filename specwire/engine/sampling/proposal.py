"""Draft tokens for the ratio test: drawn from the draft's likeliest tokens with private noise, which the target never sees (design section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwire.engine.sampling.draft import DraftSamples
from specwire.engine.sampling.ordering import top_ordered
from specwire.engine.sampling.philox import Stream, gumbel, key_to_int64, noise_words_at
from specwire.sampling_params import GREEDY_EPSILON


@dataclass(frozen=True, slots=True)
class ProposedDrafts(DraftSamples):
    """One draft token for each row, and what it was drawn from."""

    candidate_ids: Tensor  # [R, m] int64, ids of the target's vocabulary, likeliest first
    candidate_probs: Tensor  # [R, m] float32, their sum is 1; all on the draft for a greedy or bad row


def propose_drafts(
    logits: Tensor,
    num_candidates: int,
    *,
    temperatures: Sequence[float],
    keys: Sequence[int],
    indices: Sequence[int],
    choices: Sequence[int],
    target_ids: Tensor | None = None,
) -> ProposedDrafts:
    """Draw each row's draft from softmax(z / T) over its best tokens; T < 1e-5 takes the argmax.

    Args:
        logits: [R, V] float32 of the draft model. Not modified.
        num_candidates: how many tokens are drawn from (m); all if there are fewer.
        temperatures, keys, indices, choices: as for `sample_draft`.
        target_ids: [V] or [R, V] int64, the target's id of each column; None = the same.
    """
    device = logits.device
    temperature = torch.tensor([t if t >= GREEDY_EPSILON else 0.0 for t in temperatures], dtype=torch.float32, device=device).unsqueeze(1)
    is_bad = ~logits.amax(dim=1).isfinite()
    safe = logits.masked_fill(is_bad.unsqueeze(1), 0.0)
    values, columns = top_ordered(safe, min(num_candidates, logits.shape[1]))  # [R, m]
    if target_ids is None:
        token_ids = columns
    elif target_ids.dim() == 1:
        token_ids = target_ids[columns]
    else:
        token_ids = target_ids.gather(1, columns)
    scale = torch.where(temperature > 0, temperature, 1.0)  # [R, 1]
    is_first = torch.zeros_like(values).index_fill_(1, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
    probs = torch.where((temperature > 0) & ~is_bad.unsqueeze(1), (values / scale).softmax(dim=1), is_first)
    key_row = torch.tensor([key_to_int64(key) for key in keys], device=device)
    words = noise_words_at(key_row, torch.tensor(indices, device=device), torch.tensor(choices, device=device), Stream.DRAFT, token_ids)
    drawn = (gumbel(words) + probs.log()).argmax(dim=1, keepdim=True)  # [R, 1]
    scores = (values.gather(1, drawn) / scale).squeeze(1) - (safe / scale).logsumexp(dim=1)
    return ProposedDrafts(token_ids.gather(1, drawn).squeeze(1), scores.exp().masked_fill(is_bad, 0.0), token_ids, probs)
