"""The padded target against transformers, and its answers against answers one by one."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from specwire.train.data import Job
from specwire.train.generate import generate
from specwire.train.target import Target
from tests.engine.tiny_models import save_tiny_model


@pytest.mark.parametrize("family", ["llama-tied-wide-head", "qwen2", "qwen3"])
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, family)
    target = Target(tmp_path, torch.float32, torch.device("cpu"))
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = target.hidden(tokens, (0, 2))
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(hidden.features, torch.cat((expected.hidden_states[0], expected.hidden_states[2]), -1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.final, expected.hidden_states[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(hidden.final[0]), expected.logits[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(hidden.final[0] @ target.head.t(), expected.logits[0], atol=1e-3, rtol=1e-4)


def test_the_stream_behind_the_last_layer_is_a_feature_too(target: Target) -> None:
    tokens = torch.arange(8)[None]
    hidden = target.hidden(tokens, (target.config.num_layers,))
    normed = torch.nn.functional.rms_norm(hidden.features, hidden.features.shape[-1:], target.final_norm(), target.config.rms_norm_eps)
    torch.testing.assert_close(normed, hidden.final, atol=1e-5, rtol=1e-5)


def test_greedy_answers_do_not_depend_on_the_batch_and_are_those_of_transformers(target: Target, target_folder: Path) -> None:
    rng = np.random.default_rng(2)
    jobs = [Job(rng.integers(0, 256, length).tolist(), 0.0, False) for length in (1, 2, 5, 9, 14, 14)]
    shares: list[float] = []
    answers = generate(target, jobs, 40, 0, shares.append)
    alone = generate(target, jobs, 40, 1, num_rows=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    for job, answer, again in zip(jobs, answers, alone, strict=True):
        assert answer.tolist() == again.tolist()
        prompt = torch.tensor([job.prompt])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)[0, len(job.prompt) :]
        assert answer.tolist() == expected.tolist()
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1


def test_answers_end_with_eos_and_the_others_go_on(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, eos_token_id=list(range(250)))  # nearly every token ends an answer
    target = Target(tmp_path, torch.float32, torch.device("cpu"))
    jobs = [Job([index, index + 1], 1.0, False) for index in range(30)]
    answers = generate(target, jobs, 40, 0)
    ends = [answer[-1] in target.config.eos_token_ids for answer in answers]
    assert all(not np.isin(answer[:-1], target.config.eos_token_ids).any() for answer in answers)
    assert all(is_end or len(answer) == 40 for is_end, answer in zip(ends, answers, strict=True))
    assert len({len(answer) for answer in answers}) > 1


def test_sampled_answers_follow_the_distribution(target: Target) -> None:
    prompt, temperature, count = [1, 2, 3], 2.0, 4000
    drawn = Counter(int(answer[0]) for answer in generate(target, [Job(prompt, temperature, False)] * count, 1, 0, num_rows=count))
    probs = (target.logits(target.hidden(torch.tensor([prompt]), ()).final[0, -1:]) / temperature).softmax(-1)[0]
    for token in probs.topk(5).indices.tolist():
        expected = probs[token].item()
        assert abs(drawn[token] / count - expected) < 5 * (expected * (1 - expected) / count) ** 0.5
