"""The torch twin of `draft_sample`, for any device."""

import torch

from specwire.engine.kernels.gumbel_argmax_torch import gumbel_argmax
from specwire.engine.sampling.philox import Stream


def draft_sample(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft of each row with the target's noise, and how likely the draft model found it; see `sampling.draft.sample_draft`.

    Args:
        logits: [R, V] float32.
        temperatures: [R] float32, 0 is greedy.
        keys: [R] int64, two's complement.
        indices: [R] int32 or int64, absolute index of the drafted token.
        choices: [R] int32 or int64.

    Returns:
        token ids [R] int64 and their probabilities [R] float32 under softmax(z / T), at T = 1 if greedy; token 0 with 0 for a bad row.
    """
    token_ids = gumbel_argmax(logits, temperatures, keys, indices.long(), choices.long(), Stream.TARGET)
    is_bad = token_ids < 0
    token_ids = token_ids.masked_fill(is_bad, 0)
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    probs = (scaled.gather(1, token_ids[:, None])[:, 0] - scaled.logsumexp(1)).exp().clamp_(max=1.0)
    return token_ids, probs.masked_fill(is_bad, 0.0)
