"""The benchmark of two GPUs on tiny models: processes, coordinators and files of results, on any machine."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import two_gpus, two_gpus_placement, two_gpus_services, two_gpus_tables
from benchmarks.gpu.slices import Slice
from benchmarks.gpu.two_gpus_lanes import Load, describe, k_of
from benchmarks.gpu.two_gpus_measure import idle_shares
from benchmarks.gpu.two_gpus_placement import PLACEMENTS, break_even, compare, halves_ms, needed_services


def measure(folder: Path, *names: str, count: int = 2) -> list[dict[str, Any]]:
    """The files of these slices, which must be complete."""
    two_gpus.main(["--device", "cpu", "--tiny", "--commit", "test", "--out", str(folder), "--only", *names, "--concurrency", str(count)])
    found = [json.loads((folder / f"two_gpus-{name}.json").read_text()) for name in names]
    assert all(each["is_complete"] for each in found)
    return found


def test_a_service_sees_its_gpu_alone(tmp_path: Path) -> None:
    (tmp_path / "shows_gpu.py").write_text("import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:])")
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "benchmarks.gpu.two_gpus_device", "1", "shows_gpu", "--flag", "value"]
    shown = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": search}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    ).stdout
    assert shown == "1 ['--flag', 'value']\n"


def test_k_of_a_schedule() -> None:
    assert [k_of(((1, 2, 5), (3, 8, 0)), count) for count in (1, 2, 3, 8)] == [5, 5, 0, 0]


def test_the_sample_with_different_k_is_shown() -> None:
    schedule = ((1, 4, 5), (5, 256, 0))
    found = describe([(Load(128, 0), Load(2, 0)), (Load(120, 0), Load(3, 5)), (Load(60, 0), Load(3, 5))], schedule)
    assert found["k_of_different_loads"] == {"lane 0, 120 sequences": 0, "lane 1, 3 sequences": 5}
    assert found["lanes_had_different_k"]
    found = describe([(Load(128, 0), Load(3, 0))], schedule)
    assert (found["lanes_had_different_k"], found["schedule_has_one_k"]) == (False, False)


def test_idle_shares() -> None:
    row = {"forward_ms": 6.0, "draft_ms": 2.0, "period_ms": 10.0}
    assert idle_shares(row, 1, shares_gpu=False) == pytest.approx({"verifier_gpu_idle": 0.4, "drafter_gpu_idle": 0.8})
    assert idle_shares(row, 1, shares_gpu=True) == pytest.approx({"shared_gpu_idle": 0.2})
    assert idle_shares(row | {"period_ms": 15.0}, 2, shares_gpu=False) == pytest.approx({"verifier_gpu_idle": 0.2, "drafter_gpu_idle": 11 / 15})


def test_what_a_gpu_for_the_drafter_brings() -> None:
    tok_s = {"own": 150.0, "halves": 180.0, "shared": 140.0}
    rows: list[dict[str, Any]] = [{"c": 8, "drafter": "model", "placement": name, "tok_s": speed} for name, speed in tok_s.items()]
    rows[0] |= {"drafter_gpu_idle": 0.8, "period_ms": 20.0}
    rows[1] |= {"drafter_gpu_idle": 0.75, "period_ms": 18.0}
    rows.append({"c": 8, "drafter": "none", "placement": "plain", "tok_s": 120.0})
    rows.append({"c": 8, "drafter": "model", "placement": "shared, halves", "tok_s": 126.0})
    gains = compare(rows)["gains"]["model"]["8"]
    assert gains == pytest.approx(
        {"own_x_shared": 150 / 140, "halves_x_own": 1.2, "own_x_best": 180 / 140, "own_x_best_per_gpu": 90 / 140, "break_even_verifiers": 3.5}
        | {"drafter_serves": 4.0, "halves_x_shared": 0.9}
    )
    num_verifiers = gains["break_even_verifiers"]
    assert num_verifiers * 180 / (num_verifiers + 1) == pytest.approx(140), "at the break-even a GPU brings as much with the drafter's as without"
    assert break_even(140.0, 140.0) is None


def test_what_half_batches_should_take() -> None:
    half = {"forward_ms": 20.0, "draft_ms": 8.0, "period_ms": 33.0, "drafter_gpu_idle": 0.75}
    assert halves_ms(half) == 40, "the verifier is busy all the time"
    assert halves_ms(half | {"draft_ms": 21.0}) == 42
    assert halves_ms(half | {"forward_ms": 15.0}) == 33, "each half waits for its own messages"
    rows = [
        {"c": count, "drafter": "model", "placement": name, "tok_s": 1.0, **half} | {"period_ms": period}
        for count, name, period in ((128, "own", 33.0), (256, "own", 60.0), (256, "halves", 44.0))
    ]
    gains = compare(rows)["gains"]["model"]
    assert (gains["256"]["halves_ms"], gains["256"]["halves_predicted_ms"], "halves_ms" in gains["128"]) == (44, 40, False)


def test_half_batches_are_measured_where_there_are_some() -> None:
    assert [placement.counts([1, 8, 32, 128, 256]) for placement in PLACEMENTS if placement.is_halved] == [[32, 128, 256]] * 4


def test_only_services_of_what_is_left_start(tmp_path: Path) -> None:
    part = Slice("two_gpus placement", tmp_path / "placement.json", {}, [])
    assert sorted(needed_services(part, [1, 32])) == ["d0", "d1", "e0", "e1", "g1", "v0"]
    for placement in PLACEMENTS[:-1]:
        for count in placement.counts([1, 32]):
            part.add({"c": count, "drafter": placement.drafter, "placement": placement.name})
    assert needed_services(part, [1, 32]) == ["v0", "g1"]


def test_what_fails_leaves_the_other_placements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and half batches are measured, though one more drafter can't be started."""
    own, halves, shared = PLACEMENTS[:3]
    monkeypatch.setattr(two_gpus_placement, "PLACEMENTS", (dataclasses.replace(shared, service="x0"), own, halves))
    configs = two_gpus_services._Configs.of

    def with_a_broken_one(self: two_gpus_services._Configs, folder: Path, name: str) -> Any:
        config = configs(self, folder, name)
        return dataclasses.replace(config, device="cuda:9") if name == "x0" else config

    monkeypatch.setattr(two_gpus_services._Configs, "of", with_a_broken_one)
    with pytest.raises(SystemExit, match=r"not measured: .*x0 could not be started"):
        measure(tmp_path, "placement")
    found = json.loads((tmp_path / "two_gpus-placement.json").read_text())
    assert not found["is_complete"]
    rows = {row["placement"]: row for row in found["rows"]}
    assert rows.keys() == {"own", "halves"}
    for row in rows.values():
        assert min(row["propose_ms"], row["draft_ms"], row["forward_ms"], row["period_ms"]) > 0
        assert 0 <= row["verifier_gpu_idle"] < 1
        assert 0 <= row["drafter_gpu_idle"] < 1
    assert found["gains"]["model"]["2"]["halves_x_own"] == pytest.approx(rows["halves"]["tok_s"] / rows["own"]["tok_s"])


@pytest.mark.slow
def test_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [placement] = measure(tmp_path, "placement")
    rows = {(row["drafter"], row["placement"]): row for row in placement["rows"]}
    assert rows.keys() == {(one.drafter, one.name) for one in PLACEMENTS}
    for (drafter, name), row in rows.items():
        assert row["k"] == {"model": 5, "eagle3": 3, "none": 0}[drafter]
        assert row["tok_s_per_gpu"] == pytest.approx(row["tok_s"] / (1 if name in ("shared", "shared, halves", "plain") else 2))
        assert min(row["forward_ms"], row["period_ms"]) > 0
        if drafter == "none":
            assert (row["propose_ms"], row["draft_ms"], row["acceptance_length"]) == (0, 0, 1)
            continue
        assert 1 < row["acceptance_length"] <= 1 + row["k"]
        assert min(row["propose_ms"], row["draft_ms"]) > 0
        idle = [row["shared_gpu_idle"]] if name.startswith("shared") else [row["verifier_gpu_idle"], row["drafter_gpu_idle"]]
        assert all(0 <= share < 1 for share in idle)
        way = "grpc" if name == "own, gRPC" else "memory"
        assert (f"{way}_bytes_per_step" in row) == (drafter == "eagle3")
    assert rows["model", "own"]["acceptance_length"] == rows["model", "shared"]["acceptance_length"], "seeds are the same"
    gains = placement["gains"]["model"]["2"]
    assert gains["own_x_shared"] == pytest.approx(rows["model", "own"]["tok_s"] / rows["model", "shared"]["tok_s"])
    two_gpus_tables.main([str(tmp_path)])
    shown = capsys.readouterr().out
    assert "| EAGLE-3, K = 3 | 2 |" in shown
    assert "| gRPC | own, gRPC | 2 |" in shown


@pytest.mark.slow
def test_lanes(tmp_path: Path) -> None:
    [lanes] = measure(tmp_path, "lanes")
    [row] = lanes["rows"]
    assert row["x_one"] == pytest.approx(row["two_tok_s"] / max(one["tok_s"] for one in row["one"]))
    assert 0.5 < row["two"]["drafters_a_step"] <= 1, "each lane has a drafter of its own"
    assert lanes["lanes_had_different_k"]
    assert lanes["killed_lane_ran"] >= 1


@pytest.mark.slow
def test_loss(tmp_path: Path) -> None:
    [found] = measure(tmp_path, "loss")
    undisturbed, *killed = found["rows"]
    assert undisturbed["verifier_losses"] == 0
    for row in killed:
        assert row["verifier_losses"] >= 1
        assert row["accepted_tokens"] > 0
        assert (row["unexplained"], row["differs_from_undisturbed"]) == (0, 0)
