"""Noise that target and drafts share, and checkpoints that come back as modules."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specwire.engine.kernels.gumbel_argmax_torch import gumbel_argmax
from specwire.engine.sampling.philox import Stream
from specwire.errors import FailedPreconditionError
from specwire.train import run as run_module
from specwire.train.batches import BatchSource
from specwire.train.data import Job
from specwire.train.generate import generate
from specwire.train.heads import Head, make_head
from specwire.train.noise import Noise
from specwire.train.run import TrainOptions, train
from specwire.train.stored import load_stored
from specwire.train.target import Target
from tests.train.conftest import small


def silent(phase: str, done: float, total: float, note: str) -> None:
    """Shows nothing."""


def test_tokens_are_those_that_a_server_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((6, 50), generator=generator)
    noise = Noise(torch.tensor([0.0, 0.7, 1.3]), torch.tensor([1, -5, 2**40]))
    rows, indices = torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([3, 3, 3, 4, 4, 4])
    expected = gumbel_argmax(logits, noise.temperatures[rows], noise.keys[rows], indices, torch.zeros_like(indices), Stream.TARGET)
    assert torch.equal(noise.choose(logits, rows, indices), expected)
    ids = torch.randperm(50, generator=generator).expand(6, -1)
    columns = noise.choose(logits.gather(1, ids), rows, indices, ids)
    assert torch.equal(ids.gather(1, columns[:, None])[:, 0], expected)
    assert torch.allclose(noise.log_probs(logits, rows)[1], (logits[1] / 0.7).log_softmax(-1))
    assert torch.allclose(noise.log_probs(logits, rows)[0], logits[0].log_softmax(-1))


def test_answers_depend_on_their_own_noise_alone(target: Target) -> None:
    jobs = [Job([5, 6, 7][:length], 0.0, is_held_out=True) for length in (1, 2, 3, 3)]
    noise = Noise(torch.tensor([0.9, 0.9, 0.9, 0.9]), torch.tensor([3, 4, 5, 6]))
    together = generate(target, jobs, 12, 0, noise=noise)
    singly = generate(target, jobs, 12, 9, num_rows=1, noise=noise)
    assert [answer.tolist() for answer in together] == [answer.tolist() for answer in singly]
    assert together[2].tolist() != together[3].tolist(), "other keys draw other tokens"


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
@pytest.mark.parametrize("draft_vocab_size", [0, 40])
def test_drafts_without_temperature_are_the_most_likely_ones(method: str, draft_vocab_size: int, target: Target, source: BatchSource) -> None:
    ids = torch.arange(draft_vocab_size) * 3 if draft_vocab_size else None
    head = make_head(small(method), target, 3, ids)
    assert isinstance(head, Head)
    batch = source.batch(np.arange(4))
    head.start(batch)
    greedy = head.drafts(batch)
    cold, warm = (head.drafts(batch, Noise(torch.full((4,), temperature), torch.arange(4))) for temperature in (0.0, 1.0))
    assert torch.equal(cold.tokens, greedy.tokens)
    assert torch.allclose(cold.signals, greedy.signals, atol=1e-5)
    assert not torch.equal(warm.tokens, greedy.tokens)
    if ids is not None:
        answers = [slice(int(batch.prompt_lens[row]), int(batch.lengths[row])) for row in range(4)]
        assert all(torch.isin(warm.tokens[row, places], ids).all() for row, places in enumerate(answers))


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_a_checkpoint_comes_back_as_the_head_that_it_was(method: str, options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[run_module._Run] = []
    export = run_module._Run.export
    monkeypatch.setattr(run_module._Run, "export", lambda run, *results: (runs.append(run), export(run, *results))[1])
    folder = train(replace(options, recipe=small(method)), silent).head
    assert folder is not None
    target = Target(Path(options.model), torch.float32, torch.device("cpu"))
    stored = load_stored(folder, target)
    assert (stored.method, stored.num_drafts, stored.feature_layers, len(stored.calibration)) == (method, 4, (1, 2), 4)
    [run] = runs
    batch = run.source.batch(np.arange(6))
    actual, expected = stored.head.drafts(batch), run.head.drafts(batch)
    assert (actual.tokens == expected.tokens).float().mean() > 0.95, "but for rounding to bfloat16"
    assert torch.allclose(actual.signals.median(), expected.signals.median(), atol=0.05)
    config = folder / "config.json"
    config.write_text(config.read_text().replace(f'"speculators_model_type": "{method}"', '"speculators_model_type": "mtp"'))
    with pytest.raises(FailedPreconditionError, match="head of method mtp"):
        load_stored(folder, target)
