"""A budget that looks at the drafted tokens themselves: what is emitted keeps the target's distribution where a draft is accepted iff it equals the
target's own token, and loses it under a ratio test. So adaptive verification is refused with the latter."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from specwire.engine.sampling.draft import sample_draft
from specwire.engine.sampling.sampler import SamplerRows, sample_rows
from specwire.sampling_params import SamplingParams

VOCAB, START, NUM_DRAWS = 4, 1, 40_000
TARGET = 0.8 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))  # logits of the next token, by the last
DRAFT = TARGET + 0.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
BUDGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "only the likeliest token": lambda drafts: (drafts == TARGET[START].argmax()).long().cumprod(dim=1).sum(dim=1),
    "as many as the first token says": lambda drafts: torch.minimum(drafts[:, 0], torch.tensor(2)),
    "only where both are alike": lambda drafts: 2 * (drafts[:, 0] == drafts[:, 1]),
}


def p_value(counts: Tensor, probs: Tensor) -> float:
    return float(stats.chisquare(counts.double().numpy(), (probs * counts.sum()).numpy()).pvalue)


def targets_of(context: Tensor) -> Tensor:
    """The target's own token after each of context [n, T], whose first one has index 0; sequence i has key i."""
    one = SamplerRows.build([SamplingParams(temperature=1.0)], [0], [0], [0])
    keys, indices = torch.meshgrid(torch.arange(len(context)), torch.arange(1, context.shape[1] + 1), indexing="ij")
    rows = replace(one.select(torch.zeros(context.numel(), dtype=torch.int64)), keys=keys.flatten(), indices=indices.flatten())
    return sample_rows(TARGET[context.flatten()], rows).token_ids.view_as(context)


def drafts_of(last: Tensor, index: int) -> Tensor:
    """Sampled with the noise that the target samples with."""
    number = len(last)
    keys, indices = list(range(number)), [index] * number
    return sample_draft(DRAFT[last], temperatures=[1.0] * number, keys=keys, indices=indices, choices=[0] * number).token_ids


@pytest.mark.parametrize("budget", BUDGETS)
def test_strict_acceptance_keeps_the_distribution(budget: str) -> None:
    """The joint one of the first two tokens, of which each comes from the first round or from the second."""
    start = torch.full((NUM_DRAWS,), START)
    first = drafts_of(start, 1)
    drafts = torch.stack([first, drafts_of(first, 2)], dim=1)
    num_kept = BUDGETS[budget](drafts)
    targets = targets_of(torch.cat([start[:, None], drafts], dim=1))
    is_accepted = (targets[:, :2] == drafts) & (torch.arange(2) < num_kept[:, None])
    num_accepted = is_accepted.int().cumprod(dim=1).sum(dim=1)
    assert (num_kept > 0).any()
    assert 0 < num_accepted.sum() < num_kept.sum()
    # A round emits its accepted drafts and the target's token behind them; where that was one token, the next round, plain, emits the second.
    one = targets[:, 0]
    two = torch.where(num_accepted > 0, targets[:, 1], targets_of(torch.stack([start, one], dim=1))[:, 1])
    probs = torch.softmax(TARGET.double(), dim=1)
    joint = (probs[START][:, None] * probs).flatten()
    assert p_value(torch.bincount(one * VOCAB + two, minlength=VOCAB**2), joint) > 1e-4


def test_a_ratio_test_loses_it() -> None:
    """Even with a drafter that has the target's own distribution, and drafts are then never rejected: a token that is verified oftener is emitted
    oftener."""
    rng = torch.Generator().manual_seed(4)
    probs = torch.softmax(TARGET[START].double(), dim=0)
    draws = torch.multinomial(probs.expand(2, -1), NUM_DRAWS, replacement=True, generator=rng)
    drafts, plain = draws
    is_kept = drafts == probs.argmax()
    assert p_value(torch.bincount(torch.where(is_kept, drafts, plain), minlength=VOCAB), probs) < 1e-12
    is_kept = torch.rand(NUM_DRAWS, generator=rng) < 0.4
    assert p_value(torch.bincount(torch.where(is_kept, drafts, plain), minlength=VOCAB), probs) > 1e-4, "one that does not look is harmless"
