"""The whole pipeline: learning, interruption, refusals, and the command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from specwire.cli.app import app
from specwire.engine.heads.load import load_head
from specwire.errors import FailedPreconditionError
from specwire.train import run as run_module
from specwire.train.deadline import Deadline
from specwire.train.run import PHASES, TrainOptions, train
from tests.train.conftest import small


def silent(phase: str, done: float, total: float, note: str) -> None:
    """Shows nothing."""


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_the_loss_falls_and_a_head_comes_out(method: str, options: TrainOptions) -> None:
    phases: list[str] = []
    recipe = small(method, num_steps=40, tokens_per_step=800)
    result = train(replace(options, recipe=recipe), lambda phase, done, total, note: phases.append(phase))
    assert list(dict.fromkeys(phases)) == list(PHASES)
    assert result.phase == ""
    assert result.head == options.output / "head"
    assert result.evaluation is not None
    curve = json.loads((options.output / "curve.json").read_text())["curve"]
    assert [point["step"] for point in curve] == [20, 40]
    assert curve[-1]["loss"] < 0.97 * curve[0]["loss"]
    assert curve[-1]["overlap"][0] > curve[0]["overlap"][0]
    assert all(0 <= share <= 1 for share in curve[-1]["held_out"]["overlap"])
    loaded = load_head(result.head, method, target=Path(options.model))
    assert (loaded.config.num_draft_tokens, loaded.source.layer_ids) == (4, (1, 2))
    assert options.model not in (result.head / "README.md").read_text()


class StopAt(Deadline):
    """Over at the n-th look."""

    looks = 0

    def __init__(self, look: int) -> None:
        super().__init__(0)
        self._look = look

    @property
    def is_over(self) -> bool:
        StopAt.looks += 1
        return StopAt.looks == self._look


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_an_interrupted_run_comes_to_the_same_head(method: str, options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(options, recipe=small(method), answers=tmp_path / "answers")
    whole = train(replace(options, output=tmp_path / "whole"), silent)
    stopped_in = []
    for look in (3, 9, 1000):
        StopAt.looks = 0
        monkeypatch.setattr(run_module, "Deadline", lambda seconds, look=look: StopAt(look))
        result = train(options, silent)
        stopped_in.append(result.phase)
    assert stopped_in == ["training", "training", ""]
    assert whole.head is not None
    assert result.head is not None
    expected, actual = (load_file(head / "model.safetensors") for head in (whole.head, result.head))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def test_folders_of_other_runs_are_refused(options: TrainOptions) -> None:
    train(replace(options, recipe=small("eagle3", num_steps=1)), silent)
    with pytest.raises(FailedPreconditionError, match=r"recipe \(.*another --output"):
        train(replace(options, recipe=small("eagle3", num_steps=2)), silent)
    others = options.prompts.with_name("others.jsonl")
    others.write_text(options.prompts.read_text().replace("a", "b"))
    with pytest.raises(FailedPreconditionError, match=r"jobs \(.*another --output"):
        train(replace(options, recipe=small("eagle3", num_steps=1), prompts=others, answers=options.output / "others"), silent)


def test_a_training_that_diverges_says_so(options: TrainOptions) -> None:
    with pytest.raises(FailedPreconditionError, match=r"the loss is (nan|inf) by step 20: .* lower the learning rate from 1e\+30"):
        train(replace(options, recipe=small("eagle3", num_steps=40, learning_rate=1e30)), silent)
    assert not (options.output / "head").exists()


def test_training_ends_in_time(options: TrainOptions) -> None:
    recipe = small("eagle3", num_steps=1_000_000, train_seconds=0.5)
    train(replace(options, recipe=recipe), silent)
    curve = json.loads((options.output / "curve.json").read_text())["curve"]
    assert curve[-1]["seconds"] >= 0.5
    assert curve[-1]["step"] < 1_000_000


@pytest.fixture
def specwire(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs `specwire train` over the tiny target; returns its status and output."""

    def run(*arguments: str) -> tuple[int, str]:
        given = ["train", "--model", options.model, "--prompts", str(options.prompts), "--output", str(options.output), "--num-threads", "1"]
        changes = ["--set", "num_steps=20", "--set", "tokens_per_step=400", "--max-answer-tokens", "20", "--max-prompt-tokens", "24"]
        result = CliRunner().invoke(app, [*given, *changes, *arguments])
        return result.exit_code, result.output

    return run


def test_the_command_goes_on_until_it_is_done(options: TrainOptions, specwire: Callable[..., tuple[int, str]]) -> None:
    status, output = specwire("--recipe", "dspark", "--max-seconds", "0.000001")
    assert (status, "stopped after 1e-06 s in answers" in output) == (3, True)
    status, output = specwire("--recipe", "dspark")
    assert status == 0
    assert "tokens per step" in output
    assert "training 100% (step 20" in output
    assert (options.output / "head" / "config.json").is_file()


def test_the_command_names_mistakes(specwire: Callable[..., tuple[int, str]]) -> None:
    assert specwire("--recipe", "medusa")[0] == 2
    status, output = specwire("--device", "cuda:99")
    assert (status, "cuda:99" in output) == (1, True)
