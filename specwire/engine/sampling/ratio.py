"""The ratio test: a draft that was drawn from q is accepted with probability min(1, p / q), else the token is drawn from max(p - q, 0).

Whatever q is, the token that comes of it has the target's probabilities p (Leviathan et al., "Fast inference from transformers via speculative
decoding", https://arxiv.org/abs/2211.17192, appendix A.1), as long as the noise that drew the draft is used for nothing else.
"""

import torch
from torch import Tensor

from specwire.engine.sampling.philox import Stream, uniforms
from specwire.engine.sampling.sampler import SamplerRows
from specwire.engine.sampling.support import filtered_support


def target_probs(logits: Tensor, rows: SamplerRows) -> Tensor:
    """What a token is drawn with: softmax(z / T) over the support of min-p, top-k and top-p.

    Args:
        logits: [R, V] float32, processed; each row has a finite maximum and no NaN. Not modified.
        rows: temperatures above 0.

    Returns:
        [R, V] float64.
    """
    has_filter = (rows.top_ps < 1) | (rows.min_ps > 0) | (rows.top_ks < logits.shape[1])
    scaled = logits.double() / rows.temperatures.double().unsqueeze(1)
    filtered = has_filter.nonzero().squeeze(1)
    if len(filtered):
        support = filtered_support(logits[filtered], rows.filters.select(filtered))
        is_kept = (support.logits > -torch.inf).int()  # padding may name an id that is kept, too
        num_kept = torch.zeros_like(logits[filtered], dtype=torch.int32).scatter_add_(1, support.token_ids, is_kept)
        scaled[filtered] = scaled[filtered].masked_fill(num_kept == 0, -torch.inf)
    return scaled.softmax(dim=1)


def ratio_test(probs: Tensor, draft_ids: Tensor, candidate_ids: Tensor, candidate_probs: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """The token of each row: its draft, which is then accepted, or another one.

    Where p <= q for all tokens, to rounding, a rejected draft's place is drawn from p itself: the residual is empty.

    Args:
        probs: [R, V] float64, p of the target.
        draft_ids: [R] int64, drawn from the candidates.
        candidate_ids: [R, m] int64; an id may come several times.
        candidate_probs: [R, m], q of each; its sum is 1 to rounding.
        accept, residual: [R] float64 uniforms in (0, 1), independent of all else.

    Returns:
        [R] int64.
    """
    sums = candidate_probs.double().sum(dim=1, keepdim=True)
    drafted = torch.zeros_like(probs).scatter_add_(1, candidate_ids, candidate_probs.double() / sums)  # q [R, V]
    own = draft_ids.unsqueeze(1)
    is_accepted = accept.unsqueeze(1) * drafted.gather(1, own) < probs.gather(1, own)  # [R, 1]
    rest = (probs - drafted).clamp_(min=0.0)
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, probs)
    cumulative = rest.cumsum(dim=1)
    # The first token whose sum is above the mark, so one with a probability above 0.
    other = torch.searchsorted(cumulative, residual.unsqueeze(1) * cumulative[:, -1:], right=True)
    return torch.where(is_accepted, own, other).squeeze(1)


def check_drafts(logits: Tensor, rows: SamplerRows, draft_ids: Tensor, candidate_ids: Tensor, candidate_probs: Tensor) -> tuple[Tensor, Tensor]:
    """`ratio_test` of rows of logits, with the noise of their indices.

    Args:
        logits: [R, V] float32, processed. Not modified.
        rows: temperatures above 0.
        draft_ids, candidate_ids, candidate_probs: see `ratio_test`.

    Returns:
        Tokens [R] int64, in [0, V) also for bad rows, and is_bad [R] bool: a NaN, +inf, or no finite logit.
    """
    is_bad = ~logits.amax(dim=1).isfinite()
    probs = target_probs(logits.masked_fill(is_bad.unsqueeze(1), 0.0), rows)
    accept = uniforms(rows.keys, rows.indices, rows.choices, Stream.ACCEPT)
    residual = uniforms(rows.keys, rows.indices, rows.choices, Stream.RESIDUAL)
    return ratio_test(probs, draft_ids, candidate_ids, candidate_probs, accept, residual), is_bad
