"""A tiny target, prompts, and runs of the whole pipeline over them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specwire.train.batches import BatchSource
from specwire.train.data import DataConfig, Job, join_answers
from specwire.train.generate import generate
from specwire.train.recipe import RECIPES, Recipe
from specwire.train.run import TrainOptions
from specwire.train.target import Target
from tests.engine.tiny_models import save_tiny_model

DATA = DataConfig(max_prompt_tokens=24, max_answer_tokens=20, rows_per_part=16)


def small(method: str, **changes: object) -> Recipe:
    """A recipe of a few quick steps."""
    values = {"num_steps": 12, "tokens_per_step": 400, "warmup_steps": 2, "learning_rate": 3e-3, "num_draft_tokens": 4, "rerank": 32, **changes}
    return replace(RECIPES[method], **values)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny_model(folder, num_hidden_layers=4)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target(target_folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh "), rng.integers(3, 24))) for _ in range(40)]
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def source(target: Target) -> BatchSource:
    """Ten answers with all features kept; two greedy ones and a sampled one are held out."""
    rng = np.random.default_rng(1)
    jobs = [Job(rng.integers(0, 256, 3 + 3 * index).tolist(), 0.7 if index % 2 else 0.0, index in (0, 2, 5)) for index in range(10)]
    kept = BatchSource(target, join_answers(jobs, generate(target, jobs, 16, 0)), (1, 2, 3))
    kept.keep(lambda done, total: None)
    return kept


@pytest.fixture
def options(target_folder: Path, prompts: Path, tmp_path: Path) -> TrainOptions:
    return TrainOptions(str(target_folder), prompts, tmp_path / "run", small("eagle3"), DATA)
