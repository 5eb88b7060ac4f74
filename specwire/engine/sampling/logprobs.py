"""Log-probabilities of emitted tokens: the log-softmax of the raw logits, before processors, temperature and filters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specwire.engine.sampling.ordering import top_ordered
from specwire.messages import TokenLogprobs


def raw_logprobs(logits: Tensor, token_ids: Sequence[int], nums_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one emitted token a row; the best ones by falling log-probability, then rising id.

    Args:
        logits: [n, V] float32, raw, without NaN.
        token_ids: [n], the emitted tokens.
        nums_top: [n], how many of the likeliest tokens to report; 0 = only the emitted one.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)  # [n, 1]
    log_totals = logits.logsumexp(dim=1, keepdim=True)  # [n, 1]
    emitted = (logits.gather(1, ids) - log_totals).squeeze(1).tolist()
    best, best_ids = top_ordered(logits, max(nums_top, default=0)) if any(nums_top) else (logits[:, :0], ids[:, :0])
    rows = zip(emitted, best_ids.tolist(), (best - log_totals).tolist(), nums_top, strict=True)
    return [TokenLogprobs(value, list(zip(top_ids[:num], top[:num], strict=True))) for value, top_ids, top, num in rows]
