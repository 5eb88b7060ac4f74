"""Loss of a draft's distribution against the target's, with its gradient, row by row."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class LossShape:
    """What is minimised: kl x KL(target || draft) + tv x total variation distance, both at a temperature; base x the same without the bias."""

    kl: float
    tv: float
    base: float
    temperature: float


class Terms(NamedTuple):
    """Of R rows over V ids."""

    loss: torch.Tensor  # [R]
    gradient: torch.Tensor  # [R, V] by the logits, times the row's factor
    kl: torch.Tensor  # [R]
    overlap: torch.Tensor  # [R], sum of min(target, draft)
    best: torch.Tensor  # [R] int64, column of the highest logit


def loss_terms(
    logits: torch.Tensor, log_target: torch.Tensor, factors: torch.Tensor, shape: LossShape, gradient: torch.Tensor | None = None
) -> Terms:
    """Computes all of `Terms`.

    d KL / dz = mass x q - p and d TV / dz = q (s - sum q s), s = sign(q - p) / 2, where q is the draft's softmax and p the target's share of the
    same ids, whose sum is the mass.

    Args:
        logits: [R, V] of the draft, float32.
        log_target: [R, V], the target's log-probabilities at the loss's temperature.
        factors: [R], of the gradient.
        gradient: [R, V] that the rows' gradients are added to, in place.
    """
    log_draft = (logits / shape.temperature).log_softmax(-1)
    draft, target = log_draft.exp(), log_target.exp()
    kl = (target * (log_target - log_draft)).sum(-1)
    overlap = torch.minimum(target, draft).sum(-1)
    rows = (draft * target.sum(-1, keepdim=True)).sub_(target).mul_(shape.kl)
    side = (draft - target).sign_().mul_(0.5 * shape.tv).mul_(draft)
    rows += side - draft * side.sum(-1, keepdim=True)
    rows *= (factors / shape.temperature)[:, None]
    result = rows if gradient is None else gradient.add_(rows)
    return Terms(shape.kl * kl + shape.tv * (1 - overlap), result, kl, overlap, log_draft.argmax(-1))
