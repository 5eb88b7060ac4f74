"""Sharpness and fits of a head that is there already."""

import json
from pathlib import Path

import pytest

from specwire.engine.heads.load import load_head
from specwire.train import sampled, sharpen
from specwire.train.batches import BatchSource
from specwire.train.stored import load_stored
from specwire.train.target import Target
from tests.train.conftest import small
from tests.train.test_export import train_and_export


def test_a_head_s_folder_says_how_it_drafts(
    target: Target, source: BatchSource, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "head"
    train_and_export(small("eagle3", num_steps=1), target, source, folder)
    before = {name: json.loads((folder / name).read_text()) for name in ("config.json", "evaluation.json")}
    arguments = [
        str(folder), "--prompts", str(prompts), "--model", str(target.folder), "--max-prompt-tokens", "24", "--max-answer-tokens", "12"
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="too few drafts for 2 fits"):
        sharpen.main(arguments)
    assert {name: json.loads((folder / name).read_text()) for name in before} == before

    for content in (None, "", "[]"):
        (folder / "evaluation.json").unlink() if content is None else (folder / "evaluation.json").write_text(content)
        with pytest.raises(SystemExit, match=r"evaluation\.json (can't be read as JSON|holds no JSON object)"):
            sharpen.main(arguments)
        assert json.loads((folder / "config.json").read_text()) == before["config.json"]
    (folder / "evaluation.json").write_text(json.dumps(before["evaluation.json"]))

    monkeypatch.setattr(sampled, "_MIN_DRAFTS", 10)
    monkeypatch.setattr(sampled, "choose_sharpness", lambda observations: (1.2, 0.05))
    sharpen.main(arguments)
    config, evaluation = (json.loads((folder / name).read_text()) for name in before)
    assert config["draft_sharpness"] == evaluation["draft_sharpness"] == 1.2
    assert evaluation["draft_sharpness_gain"] == 0.05
    assert [fit["temperature"] for fit in config["confidence_calibration"]["sampled"]] == [0.7, 1.0]
    unchanged = set(config) - {"draft_sharpness", "confidence_calibration"}
    assert {key: config[key] for key in unchanged} == {key: before["config.json"][key] for key in unchanged}
    assert evaluation["greedy"] == before["evaluation.json"]["greedy"]
    load_head(folder, "eagle3", target=target.folder)
    assert load_stored(folder, target).sharpness == 1.2
