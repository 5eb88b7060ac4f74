"""Jobs, answers on disk and batches."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specwire.errors import FailedPreconditionError, InvalidArgumentError
from specwire.tokenizer import Tokenizer
from specwire.train.answers import load_or_generate
from specwire.train.batches import BatchSource, plan_batches
from specwire.train.data import DataConfig, Job, join_answers, make_jobs
from specwire.train.deadline import Deadline, TimeUp
from specwire.train.target import Target
from tests.train.conftest import DATA


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(target_folder)


def test_jobs_are_drawn_by_the_seed_and_divided(prompts: Path, tokenizer: Tokenizer) -> None:
    jobs = make_jobs(prompts, tokenizer, DATA, 256)
    assert len(jobs) == 40
    assert [len(job.prompt) for job in jobs] == sorted(len(job.prompt) for job in jobs)
    assert sum(job.temperature == 0 for job in jobs) == 20
    assert sum(job.is_held_out for job in jobs) == 4
    assert jobs == make_jobs(prompts, tokenizer, DATA, 256)
    fewer = make_jobs(prompts, tokenizer, replace(DATA, num_prompts=20, answers_per_prompt=2, seed=1), 256)
    assert len(fewer) == 40
    assert {job.temperature for job in fewer if job.prompt == fewer[0].prompt} == {0.0, 0.7}
    held_out = {tuple(job.prompt) for job in fewer if job.is_held_out}
    assert held_out.isdisjoint(tuple(job.prompt) for job in fewer if not job.is_held_out)


def test_prompts_that_do_not_fit_are_left_out(prompts: Path, tokenizer: Tokenizer) -> None:
    assert max(len(job.prompt) for job in make_jobs(prompts, tokenizer, replace(DATA, max_prompt_tokens=12), 256)) <= 12
    with pytest.raises(InvalidArgumentError, match="at most -2 tokens, and training needs 10"):
        make_jobs(prompts, tokenizer, DATA, 50)


@pytest.mark.parametrize("change", [{"max_answer_tokens": 0}, {"num_held_out": 0}, {"greedy_share": 2.0}, {"temperature": 0.0}])
def test_mistakes_are_named(change: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(change))):
        DataConfig(**change)


def test_answers_are_kept_by_parts(target: Target, prompts: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    jobs, seen = make_jobs(prompts, tokenizer, DATA, 256), []

    class AfterOnePart(Deadline):
        @property
        def is_over(self) -> bool:
            return (tmp_path / "answers" / "part-00000.npz").is_file()

    with pytest.raises(TimeUp):
        load_or_generate(tmp_path / "answers", target, jobs, DATA, AfterOnePart(0), lambda done, total: None)
    first = (tmp_path / "answers" / "part-00000.npz").stat().st_mtime_ns
    answers = load_or_generate(tmp_path / "answers", target, jobs, DATA, Deadline(0), lambda done, total: seen.append((done, total)))
    assert (tmp_path / "answers" / "part-00000.npz").stat().st_mtime_ns == first
    assert seen[-1] == (40, 40)
    whole = load_or_generate(tmp_path / "others", target, jobs, DATA, Deadline(0), lambda done, total: None)
    assert [answer.tolist() for answer in answers] == [answer.tolist() for answer in whole]
    with pytest.raises(FailedPreconditionError, match=r"temperature.*--answers"):
        load_or_generate(tmp_path / "answers", target, jobs, replace(DATA, temperature=0.9), Deadline(0), lambda done, total: None)


def test_loops_are_cut_and_empty_answers_left_out() -> None:
    jobs = [Job([1, 2], 0.0, False), Job([3], 0.7, True), Job([4], 0.7, False)]
    sequences = join_answers(jobs, [np.array([5] * 40), np.array([6, 7]), np.array([8])])
    assert sequences.tokens.tolist() == [1, 2, 5, 5, 3, 6, 7]
    assert sequences.lengths.tolist() == [4, 3]
    assert (sequences.num_loops, sequences.num_answer_tokens) == (1, 4)
    with pytest.raises(InvalidArgumentError, match="too few to train"):
        join_answers(jobs, [np.array([5] * 40), np.array([6]), np.array([8])])


def test_batches_hold_every_sequence_once_and_no_more_tokens_than_allowed() -> None:
    lengths = np.random.default_rng(0).integers(2, 300, 200)
    plan = plan_batches(lengths, 1000, 64, np.random.default_rng(1))
    assert sorted(np.concatenate(plan).tolist()) == list(range(200))
    padded = [-(-lengths[rows].max() // 64) * 64 * len(rows) for rows in plan]
    assert max(padded) <= 1000
    assert sum(padded) < 1.6 * lengths.sum()
    assert len(plan_batches(np.array([5000, 10]), 1000, 64, np.random.default_rng(1))) == 2


def test_kept_features_are_those_computed_for_a_batch(target: Target, source: BatchSource) -> None:
    anew = BatchSource(target, source.sequences, (1, 2, 3))
    rows = np.array([0, 7, 3])
    kept, computed = source.batch(rows), anew.batch(rows)
    assert torch.equal(kept.tokens, computed.tokens)
    for row, length in enumerate(kept.lengths.tolist()):
        torch.testing.assert_close(kept.features[row, :length], computed.features[row, :length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept.final[row, :length], computed.final[row, :length], atol=1e-4, rtol=1e-4)
    assert json.dumps(kept.lengths.tolist()) == json.dumps(source.sequences.lengths[rows].tolist())
