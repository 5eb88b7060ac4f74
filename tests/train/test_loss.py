"""The loss over the vocabulary against torch's own derivatives."""

import os
import subprocess
import sys

import pytest
import torch

from specwire.train import fused_terms, terms
from specwire.train import loss as loss_module
from specwire.train.loss import vocabulary_loss
from specwire.train.terms import LossShape

NUM_DRAFTS, NUM_ROWS, HIDDEN, VOCAB, RANK = 3, 7, 8, 23, 4


def plain_loss(
    hidden: torch.Tensor, weights: torch.Tensor, target: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, shape: LossShape
) -> torch.Tensor:
    """target [R, V'] over the ids that can be drafted."""
    total = torch.zeros(())
    for factor, logits in ((1.0, hidden @ head.t() + (0 if bias is None else bias)), (0.0 if bias is None else shape.base, hidden @ head.t())):
        log_draft = (logits / shape.temperature).log_softmax(-1)
        kl = (target * (target.log() - log_draft)).sum(-1)
        distance = 1 - torch.minimum(target, log_draft.exp()).sum(-1)
        total = total + factor * ((shape.kl * kl + shape.tv * distance) * weights / weights.sum()).sum()
    return total


@pytest.mark.parametrize("draft_ids", [None, torch.tensor([1, 4, 5, 9, 17, 22])])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [LossShape(1.0, 1.0, 0.3, 1.0), LossShape(1.0, 0.0, 0.0, 0.7), LossShape(0.5, 2.0, 1.0, 1.3)])
def test_value_and_gradients(draft_ids: torch.Tensor | None, has_bias: bool, shape: LossShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_CPU_NUMBERS", 3 * VOCAB)  # three rows a piece
    torch.manual_seed(0)
    hidden = torch.randn(NUM_DRAFTS, NUM_ROWS, HIDDEN, requires_grad=True)
    weights = torch.rand(NUM_DRAFTS, NUM_ROWS)
    weights[1, 2:4] = 0
    final, head = torch.randn(NUM_ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    drafted = head if draft_ids is None else head[draft_ids]
    previous = torch.randn(NUM_ROWS, RANK, requires_grad=True) if has_bias else None
    bias_head = torch.randn(len(drafted), RANK, requires_grad=True) if has_bias else None
    inputs = [tensor for tensor in (hidden, previous, bias_head) if tensor is not None]

    value, statistics = vocabulary_loss(hidden, weights, final, head, shape, draft_ids=draft_ids, previous=previous, bias_head=bias_head)
    gradients = torch.autograd.grad(2 * value, inputs)

    all_target = (final @ head.t() / shape.temperature).softmax(-1)
    target = all_target if draft_ids is None else all_target[:, draft_ids]
    bias = previous @ bias_head.t() if previous is not None and bias_head is not None else None
    expected = plain_loss(hidden, weights, target, drafted, bias, shape)
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)
    for gradient, wanted in zip(gradients, torch.autograd.grad(2 * expected, inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-4)

    logits = hidden @ drafted.t() + (0 if bias is None else bias)
    best = logits.argmax(-1) if draft_ids is None else draft_ids[logits.argmax(-1)]
    assert torch.equal(statistics.is_top, best == all_target.argmax(-1))
    torch.testing.assert_close(statistics.overlap, torch.minimum(target, (logits / shape.temperature).softmax(-1)).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_draft_equal_to_the_target_costs_nothing() -> None:
    torch.manual_seed(0)
    final, head = torch.randn(NUM_ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    hidden = final.expand(2, -1, -1).clone().requires_grad_()
    value, statistics = vocabulary_loss(hidden, torch.ones(2, NUM_ROWS), final, head, LossShape(1.0, 1.0, 0.0, 1.0))
    [gradient] = torch.autograd.grad(value, [hidden])
    assert abs(value.item()) < 1e-5
    assert gradient.abs().max() < 1e-5
    assert statistics.overlap.min() > 1 - 1e-5
    assert statistics.is_top.all()


@pytest.mark.parametrize("size", [16, 23, 40])
@pytest.mark.parametrize("shape", [LossShape(1.0, 1.0, 0.0, 1.0), LossShape(0.5, 2.0, 0.0, 0.7)])
def test_the_kernel_computes_what_its_twin_does(size: int, shape: LossShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_terms, "BLOCK", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(size)
    logits, target = (3 * torch.randn(5, size, generator=generator) for _ in range(2))
    log_target = target.log_softmax(-1)[:, :size] - 0.1  # as if some of the vocabulary could not be drafted
    factors = torch.rand(5, generator=generator)
    expected = terms.loss_terms(logits, log_target, factors, shape)
    inputs = [tensor.to(device) for tensor in (logits, log_target, factors)]
    actual = fused_terms.loss_terms(*inputs, shape)
    for mine, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, atol=1e-5, rtol=1e-4)
    added = fused_terms.loss_terms(*inputs, shape, torch.ones(5, size, device=device))
    torch.testing.assert_close(added.gradient.cpu(), 1 + expected.gradient, atol=1e-5, rtol=1e-4)


def test_the_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.train.hopper"], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert [int(lines) > 100 for lines in done.stdout.split()] == [True, True]
