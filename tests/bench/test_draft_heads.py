"""The GPU benchmark of draft heads on a tiny model: the same code from the command line to the file of results."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import draft_heads


@pytest.mark.slow  # seven coordinators, one after the other
def test_eagle3(tmp_path: Path) -> None:
    draft_heads.main(["--device", "cpu", "--tiny", "--commit", "test", "--out", str(tmp_path), "--only", "eagle3", "--concurrency", "2"])
    text = (tmp_path / "draft_heads-eagle3.json").read_text()
    assert str(tmp_path) not in text
    found = json.loads(text)
    assert found["is_complete"]
    row = found["rows"][0]  # where three drafts don't pay there is one with the schedule, too
    assert row["policy"] == "fixed"
    plain, fixed = row["configurations"]["plain"], row["configurations"]["fixed"]
    assert plain["features"] == {}
    assert plain["acceptance_length"] == 1
    assert fixed["acceptance_length"] > 1
    assert fixed["features"]["memory"]["bytes_per_read"] > 0
    assert 0 < fixed["breakdown"]["features_ms"] < fixed["breakdown"]["draft_ms"] < fixed["breakdown"]["propose_ms"]


def test_a_head_is_of_one_method(tmp_path: Path) -> None:
    common = ["--device", "cpu", "--tiny", "--commit", "test", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="--only names the slice of it: smollm-eagle3 or smollm-dspark"):
        draft_heads.main([*common, "--head", "head", "--prompts", "prompts.jsonl"])
    with pytest.raises(SystemExit, match="smollm-dspark needs --head and --prompts"):
        draft_heads.main([*common, "--only", "smollm-dspark"])
