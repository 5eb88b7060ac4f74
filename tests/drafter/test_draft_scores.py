"""What a draft model draws, and the scores that it gives: probabilities at the request's temperature."""

import pytest
import torch

from drafter_svc.method import Ask
from specwire.engine.sampling.draft import sample_draft
from specwire.sampling_params import SamplingParams
from tests.drafter.draft_models import GREEDY, HOT, MODEL, SAMPLED, Make, tokens
from tests.drafter.helpers import open_request
from tests.drafter.target import VOCAB_SIZE, target_logits, tiny_model


def test_scores_are_the_probabilities_of_the_drawn_tokens(make: Make) -> None:
    method = make()
    prompts, sampling = [tokens(9), tokens(12, seed=1)], [GREEDY, SAMPLED]
    for seq_id in range(2):
        method.open(seq_id, open_request(prompts[seq_id], sampling=sampling[seq_id]))
    for seq_id, drafts in enumerate(method.propose([Ask(0, 4), Ask(1, 4)])):
        rows = target_logits(MODEL, [*prompts[seq_id], *drafts.token_ids])[len(prompts[seq_id]) - 1 : -1]
        probs = torch.softmax(rows / (sampling[seq_id].temperature or 1.0), -1)
        assert drafts.scores == pytest.approx([float(row[token]) for row, token in zip(probs, drafts.token_ids, strict=True)], abs=1e-5)


def test_greedy_drafting_of_sampled_requests(make: Make) -> None:
    drafts = make_and_draft(make, HOT, greedy=True)
    assert drafts == target_logits(MODEL, [*tokens(9), *drafts]).argmax(-1)[8:-1].tolist()
    assert drafts != make_and_draft(make, HOT)


@pytest.mark.parametrize("sharpness", [0.5, 2.5])
def test_logits_are_sharpened_before_noise(make: Make, sharpness: float) -> None:
    method = make(sharpness=sharpness)
    prompt = tokens(9)
    request = open_request(prompt, sampling=SAMPLED)
    method.open(0, request)
    (drafts,) = method.propose([Ask(0, 5)])
    rows = sharpness * target_logits(MODEL, [*prompt, *drafts.token_ids])[len(prompt) - 1 : -1]
    expected = sample_draft(rows, temperatures=[0.8] * 5, keys=[request.noise_key] * 5, indices=range(9, 14), choices=[request.choice] * 5)
    assert drafts.token_ids == expected.token_ids.tolist()
    assert drafts.scores == pytest.approx(expected.probs.tolist(), abs=1e-5)
    assert drafts.token_ids != make_and_draft(make, SAMPLED)


def test_greedy_drafts_are_the_same_however_sharp(make: Make) -> None:
    assert make_and_draft(make, GREEDY, sharpness=5.0) == make_and_draft(make, GREEDY)


def make_and_draft(make: Make, sampling: SamplingParams, **options: object) -> list[int]:
    method = make(**options)
    method.open(0, open_request(tokens(9), sampling=sampling))
    return method.propose([Ask(0, 5)])[0].token_ids


def test_only_the_temperature_is_applied(make: Make) -> None:
    plain = make_and_draft(make, SAMPLED)
    assert plain == make_and_draft(make, SAMPLED.replace(top_k=1, repetition_penalty=2.0, logit_bias={3: 50.0}, min_tokens=5))
    assert plain != make_and_draft(make, HOT)


def test_broken_weights_give_scores_of_zero(make: Make) -> None:
    model = tiny_model()
    model._embedding.fill_(float("nan"))
    method = make(model)
    method.open(0, open_request(tokens(5)))
    (drafts,) = method.propose([Ask(0, 3)])
    assert drafts.scores == [0.0] * 3
    assert all(0 <= token_id < VOCAB_SIZE for token_id in drafts.token_ids)
