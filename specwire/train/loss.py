"""The loss over the vocabulary, with its gradient, piece by piece: logits of a whole batch would not fit beside each other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specwire.train import terms
from specwire.train.terms import LossShape, Terms

_CUDA_NUMBERS, _CPU_NUMBERS = 2**27, 2**23
"""Logits of one piece."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of M drafts for each of R target positions; where there is none, anything."""

    kl: torch.Tensor  # [M, R] float32, KL(target || draft)
    overlap: torch.Tensor  # [M, R] float32, sum of min(target, draft): the best acceptance rate of a sampled draft
    is_top: torch.Tensor  # [M, R] bool, the most likely tokens agree


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [R, n] times weight [V, n], float32 [R, V]; on CUDA multiplied in the weight's dtype, whatever autocast says."""
    with torch.autocast(weight.device.type, enabled=False):
        if weight.device.type == "cuda" and weight.dtype != torch.float32:
            return torch.mm(rows.to(weight.dtype), weight.t(), out_dtype=torch.float32)
        return F.linear(rows.float(), weight.float())


def vocabulary_loss(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    final: torch.Tensor,
    head: torch.Tensor,
    shape: LossShape,
    *,
    draft_ids: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    bias_head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Statistics]:
    """Mean loss of the drafts, differentiable in hidden, previous and bias_head.

    Args:
        hidden: [M, R, hidden_size], what the drafter multiplies with the head.
        weights: [M, R] of each draft; 0 where there is none.
        final: [R, hidden_size], what the target multiplies with the head.
        head: [vocab_size, hidden_size], frozen.
        draft_ids: [draft_vocab_size] ids that can be drafted; None = all.
        previous: [R, rank], of the token before; its product with bias_head [draft_vocab_size, rank] is added to the logits.
    """
    with torch.no_grad():
        sums = _Gradients(hidden, weights, head if draft_ids is None else head[draft_ids], previous, bias_head)
        size = max(1, (_CUDA_NUMBERS if head.device.type == "cuda" else _CPU_NUMBERS) // len(head))
        for start in range(0, hidden.shape[1], size):
            rows = slice(start, start + size)
            log_target = product(final[rows], head).div_(shape.temperature).log_softmax(-1)
            top = log_target.argmax(-1)
            sums.add(rows, log_target if draft_ids is None else log_target[:, draft_ids], top, draft_ids, shape)
    # A function with just these gradients, and the loss as its value.
    linear = (hidden * sums.hidden).sum()
    if previous is not None and bias_head is not None:
        linear = linear + (previous * sums.previous).sum() + (bias_head * sums.bias_head).sum()
    return linear - linear.detach() + sums.loss, Statistics(sums.kl, sums.overlap, sums.is_top)


class _Gradients:
    """Loss, gradients and statistics, filled piece by piece."""

    def __init__(
        self, hidden: torch.Tensor, weights: torch.Tensor, head: torch.Tensor, previous: torch.Tensor | None, bias_head: torch.Tensor | None
    ) -> None:
        self._inputs, self._head = hidden, head
        self._terms = _terms_on(head.device)
        self._scale = weights / weights.sum().clamp_min(1e-6)
        self._previous = hidden.new_zeros((hidden.shape[1], 0)) if previous is None else previous.float()
        self._bias_head = hidden.new_zeros((len(head), 0)) if bias_head is None else bias_head.float()
        self.loss = torch.zeros((), device=hidden.device)
        self.hidden = torch.zeros_like(hidden, dtype=torch.float32)
        self.previous, self.bias_head = torch.zeros_like(self._previous), torch.zeros_like(self._bias_head)
        self.kl, self.overlap = torch.zeros_like(weights), torch.zeros_like(weights)
        self.is_top = torch.zeros_like(weights, dtype=torch.bool)

    def add(self, rows: slice, log_target: torch.Tensor, top: torch.Tensor, draft_ids: torch.Tensor | None, shape: LossShape) -> None:
        """Target positions `rows`: log-probabilities of the ids that can be drafted, and the most likely of all ids."""
        previous = self._previous[rows]
        has_bias = previous.shape[1] > 0
        bias = previous @ self._bias_head.t() if has_bias else None
        d_bias = torch.zeros_like(log_target) if has_bias else None
        for draft, hidden in enumerate(self._inputs):
            factors = self._scale[draft, rows]
            base = product(hidden[rows], self._head)
            result = self._terms(base if bias is None else base + bias, log_target, factors, shape)
            self.kl[draft, rows], self.overlap[draft, rows] = result.kl, result.overlap
            self.is_top[draft, rows] = (result.best if draft_ids is None else draft_ids[result.best]) == top
            self.loss += (result.loss * factors).sum()
            if d_bias is not None:
                d_bias += result.gradient
                if shape.base:
                    base_terms = self._terms(base, log_target, shape.base * factors, shape, result.gradient)
                    self.loss += shape.base * (base_terms.loss * factors).sum()
            self.hidden[draft, rows] = product(result.gradient, self._head.t())
        if d_bias is not None:
            self.previous[rows] = d_bias @ self._bias_head
            self.bias_head.addmm_(d_bias.t(), previous)


def _terms_on(device: torch.device) -> Callable[..., Terms]:
    if device.type != "cuda":
        return terms.loss_terms
    from specwire.train import fused_terms

    return fused_terms.loss_terms
