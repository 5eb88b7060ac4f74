"""The benchmark of two GPUs on tiny models: processes, coordinators and files of results, on any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import two_gpus
from benchmarks.gpu.two_gpus_lanes import k_of


def measure(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The files of these slices, which must be complete."""
    two_gpus.main(["--device", "cpu", "--tiny", "--commit", "test", "--out", str(folder), "--only", *names, "--concurrency", "2"])
    found = [json.loads((folder / f"two_gpus-{name}.json").read_text()) for name in names]
    assert all(each["is_complete"] for each in found)
    return found


def test_a_service_sees_its_gpu_alone(tmp_path: Path) -> None:
    (tmp_path / "shows_gpu.py").write_text("import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])")
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "benchmarks.gpu.two_gpus_device", "1", "shows_gpu", "--flag", "value"]
    shown = subprocess.run(command, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True, check=True).stdout
    assert shown == "1 ['--flag', 'value']\n"


def test_k_of_a_schedule() -> None:
    assert [k_of(((1, 2, 5), (3, 8, 0)), count) for count in (1, 2, 3, 8)] == [5, 5, 0, 0]


def test_halves(tmp_path: Path) -> None:
    [found] = measure(tmp_path, "halves")
    rows = {row["steps"]: row for row in found["rows"]}
    assert rows.keys() == {"lockstep", "halves"}
    for row in rows.values():
        assert row["k"] == 5
        assert 1 < row["acceptance_length"] <= 6
        assert min(row["propose_ms"], row["draft_ms"], row["forward_ms"], row["period_ms"]) > 0
        assert 0 <= row["verifier_gpu_idle"] < 1
        assert 0 <= row["drafter_gpu_idle"] < 1
    assert found["halves_x_lockstep"]["2"] == pytest.approx(rows["halves"]["tok_s"] / rows["lockstep"]["tok_s"])


@pytest.mark.slow
def test_placement_and_lanes(tmp_path: Path) -> None:
    placement, lanes = measure(tmp_path, "placement", "lanes")
    rows = {row["placement"]: row for row in placement["rows"]}
    assert rows["own"]["tok_s_per_gpu"] == pytest.approx(rows["own"]["tok_s"] / 2)
    assert rows["plain"]["propose_ms"] == rows["plain"]["draft_ms"] == 0
    assert 0 <= rows["shared"]["shared_gpu_idle"] < 1
    assert placement["own_x_shared"]["2"] == pytest.approx(rows["own"]["tok_s"] / rows["shared"]["tok_s"])
    assert lanes["loads"]
    assert lanes["killed_lane_ran"] >= 1
