"""Drafting with the target's noise."""

import math

import pytest
import torch

from specwire.engine.sampling.draft import sample_draft, sample_draft_among
from specwire.engine.sampling.sampler import SamplerRows, sample_rows
from specwire.sampling_params import SamplingParams

NUM = 40_000


def _target(logits: torch.Tensor, params: SamplingParams, choice: int = 0) -> torch.Tensor:
    num = len(logits)
    return sample_rows(logits, SamplerRows.build([params] * num, range(num), [9] * num, [choice] * num)).token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_equal_logits_give_the_target_s_token(temperature: float) -> None:
    logits = 2 * torch.randn(200, 1500, generator=torch.Generator().manual_seed(0))
    drafts = sample_draft(logits, temperatures=[temperature] * 200, keys=range(200), indices=[9] * 200, choices=[1] * 200)
    assert torch.equal(drafts.token_ids, _target(logits, SamplingParams(temperature=temperature), choice=1))
    probs = (logits / (temperature or 1.0)).softmax(dim=1).gather(1, drafts.token_ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(drafts.probs, probs)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_agreement_is_at_least_what_shared_noise_promises(seed: int, temperature: float) -> None:
    """P(equal) >= (1 - TV) / (1 + TV), and no coupling reaches more than 1 - TV."""
    generator = torch.Generator().manual_seed(seed)
    target_logits = torch.randn(1, 20, generator=generator)
    draft_logits = target_logits + 0.3 * (1 + seed) * torch.randn(1, 20, generator=generator)
    target_probs, draft_probs = (target_logits / temperature).softmax(1), (draft_logits / temperature).softmax(1)
    distance = 0.5 * (target_probs - draft_probs).abs().sum().item()
    drafts = sample_draft(draft_logits.expand(NUM, -1), temperatures=[temperature] * NUM, keys=range(NUM), indices=[9] * NUM, choices=[0] * NUM)
    agreement = (drafts.token_ids == _target(target_logits.expand(NUM, -1), SamplingParams(temperature=temperature))).double().mean().item()
    tolerance = 4 * math.sqrt(0.25 / NUM)
    assert (1 - distance) / (1 + distance) - tolerance <= agreement <= 1 - distance + tolerance


def test_a_draft_vocabulary_indexes_noise_by_target_id() -> None:
    """Where the target can only draw tokens that the draft head has too, both draw the same ones."""
    generator = torch.Generator().manual_seed(5)
    target_ids = torch.randperm(1000, generator=generator)[:50].sort().values
    draft_logits = torch.randn(300, 50, generator=generator)
    target_logits = torch.full((300, 1000), -torch.inf)
    target_logits[:, target_ids] = draft_logits
    for temperature in (0.0, 1.0):
        drafts = sample_draft(
            draft_logits,
            temperatures=[temperature] * 300,
            keys=range(300),
            indices=[9] * 300,
            choices=[0] * 300,
            target_ids=target_ids,
            target_vocab_size=1000,
        )
        assert torch.equal(drafts.token_ids, _target(target_logits, SamplingParams(temperature=temperature)))


def test_rows_of_different_temperatures_and_a_bad_row() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 5] = math.log(7)  # probability 1/2
    logits[2, 0] = torch.nan
    drafts = sample_draft(logits, temperatures=[0.0, 1e-4, 1.0], keys=[2**64 - 1, 0, 1], indices=[3, 4, 5], choices=[0, 1, 2])
    assert drafts.token_ids[:2].tolist() == [5, 5]
    assert drafts.probs.tolist() == pytest.approx([0.5, 1.0, 0.0])
    assert 0 <= drafts.token_ids[2] < 8


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_among_a_few_tokens_as_if_all_others_were_impossible(temperature: float) -> None:
    generator = torch.Generator().manual_seed(6)
    token_ids = torch.stack([torch.randperm(1000, generator=generator)[:40] for _ in range(200)])
    few = torch.randn(200, 40, generator=generator)
    few[:20] = few[:20].round()  # ties, which the lowest id wins
    everything = torch.full((200, 1000), -torch.inf).scatter_(1, token_ids, few)
    given = {"temperatures": [temperature] * 200, "keys": range(200), "indices": [9] * 200, "choices": [1] * 200}
    expected, found = sample_draft(everything, **given), sample_draft_among(token_ids, few, **given)  # type: ignore[arg-type]
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.probs, expected.probs)
    bad = sample_draft_among(token_ids[:1], torch.full((1, 40), torch.nan), temperatures=[temperature], keys=[1], indices=[9], choices=[0])
    assert bad.probs.tolist() == [0.0]
    assert int(bad.token_ids) in token_ids[0]
