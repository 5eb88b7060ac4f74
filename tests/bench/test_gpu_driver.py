"""The driver of the GPU benchmarks on jobs that measure nothing: what it runs, leaves, cuts, packs, and where it goes on."""

import argparse
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import all as driver
from benchmarks.gpu import jobs
from benchmarks.gpu.jobs import JOBS, SECONDS, Job
from benchmarks.gpu.slices import Slices, make_parser

_BENCH = """
import json, os, pathlib, sys, threading
given = sys.argv[1:]
names = given[given.index("--only") + 1 : given.index("--out")]
out = pathlib.Path(given[given.index("--out") + 1])
for name in names:
    if name == "hangs":
        pathlib.Path(out / "pid").write_text(str(os.getpid()))
        threading.Event().wait()
    figures = {"is_complete": name != "half", "versions": {"specwire": "c0"}, "settings": {"tiny": True}}
    (out / f"fakebench-{name}.json").write_text(json.dumps(figures))
    if name == "fails":
        print("what went wrong")
        sys.exit(5)
"""
_WHOLE = """
import pathlib, sys
given = sys.argv[1:]
(pathlib.Path(given[given.index("--out") + 1]) / "whole.txt").write_text(" ".join(given))
"""


@pytest.fixture
def fake_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a module beside the results."""
    (tmp_path / "fakebench.py").write_text(_BENCH)
    (tmp_path / "fakewhole.py").write_text(_WHOLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    monkeypatch.setitem(SECONDS, "fakebench", {"one": 20, "two": 20, "long": 900, "fails": 20, "half": 20, "hangs": 0, "asked": 20})
    found = {name: Job("fakebench", (name,)) for name in ("long", "fails", "half", "hangs")}
    found |= {"both": Job("fakebench", ("one", "two")), "asks": Job("fakebench", ("asked",), ("--model", "{model}"))}
    found["prints"] = Job("timeit", arguments=("-n", "1", "pass"), seconds=20)
    found["whole"] = Job("fakewhole", seconds=20, takes_folder=True)
    monkeypatch.setattr(driver, "JOBS", found)


def run(folder: Path, *arguments: str) -> int:
    return driver.main([*arguments, "--out", str(folder / "out"), "--commit", "c0", "--device", "cpu", "--tiny"])


def states(text: str) -> dict[str, str]:
    """Of the table at the end."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("job "))
    return {name: state for name, state, *_ in map(str.split, lines[start + 2 :])}


@pytest.mark.usefixtures("fake_jobs")
def test_what_fits_runs_and_the_rest_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "back"))
    assert run(tmp_path, "long", "both", "fails", "half", "asks", "prints", "--budget", "200") == 1
    text = capsys.readouterr().out
    assert states(text) == {"long": "left", "both": "done", "fails": "failed", "half": "unfinished", "asks": "left", "prints": "done"}
    assert "what went wrong" in text
    assert "needs --model" in text
    known = json.loads((tmp_path / "out" / "all.json").read_text())
    assert known["fails"]["why"] == "exit status 5"
    with tarfile.open(tmp_path / "back" / "results.tar.gz") as archive:
        assert {"all.json", "fakebench-one.json", "logs/both.log"} <= set(archive.getnames())

    assert run(tmp_path, "both", "prints", "--budget", "5") == 0
    assert states(capsys.readouterr().out) == {"both": "done", "prints": "done"}
    (tmp_path / "out" / "fakebench-two.json").unlink()
    assert run(tmp_path, "both", "--budget", "50") == 0
    assert "both: two, about 32 s" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_jobs")
def test_results_without_slices_lie_in_the_folder(tmp_path: Path) -> None:
    assert run(tmp_path, "whole", "--budget", "60") == 0
    assert (tmp_path / "out" / "whole.txt").read_text() == f"--out {tmp_path / 'out'} --device cpu --tiny"
    assert run(tmp_path, "whole", "--budget", "5") == 0  # done, and known to be


@pytest.mark.usefixtures("fake_jobs")
def test_as_many_slices_as_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "both", "--budget", "40") == 1
    assert states(capsys.readouterr().out) == {"both": "unfinished"}
    assert (tmp_path / "out" / "fakebench-one.json").is_file()
    assert not (tmp_path / "out" / "fakebench-two.json").exists()


@pytest.mark.usefixtures("fake_jobs")
def test_a_job_that_hangs_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jobs, "START_S", 2.0)
    monkeypatch.setattr(driver, "_GRACE_S", 2.0)
    assert run(tmp_path, "hangs", "prints", "--budget", "60") == 1
    assert states(capsys.readouterr().out) == {"hangs": "cut", "prints": "done"}
    pid = int((tmp_path / "out" / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("fake_jobs")
def test_what_keeps_its_rows_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jobs, "_KEEP_ROWS", {"fakebench"})
    assert run(tmp_path, "long", "--budget", "100") == 1
    assert states(capsys.readouterr().out) == {"long": "left"}
    assert run(tmp_path, "long", "--budget", "100", "--fill") == 0  # it is quick here


def test_kernels_come_from_another_machine(tmp_path: Path) -> None:
    (tmp_path / "a" / "triton" / "x").mkdir(parents=True)
    (tmp_path / "a" / "triton" / "x" / "kernel.cubin").write_bytes(b"1")
    driver.pack(tmp_path / "a", tmp_path / "b")
    driver.unpack_kernels(tmp_path / "b")
    assert (tmp_path / "b" / "triton" / "x" / "kernel.cubin").read_bytes() == b"1"
    driver.pack(tmp_path / "b", tmp_path / "c")
    with tarfile.open(tmp_path / "c" / "results.tar.gz") as archive:
        assert "triton.tar.gz" not in archive.getnames()


def test_jobs_name_what_there_is() -> None:
    for name, job in JOBS.items():
        assert (job.seconds > 0) != bool(job.slices), name
        assert set(job.slices) <= set(SECONDS.get(job.benchmark, {})), name
        assert job.estimate_s(job.slices) <= 560, f"{name} is longer than a call"
        for argument in job.arguments:
            assert not argument.startswith("tests/") or Path(__file__).parents[2].joinpath(argument).exists(), argument


def make_slices(folder: Path, *arguments: str) -> tuple[Slices, argparse.Namespace]:
    return Slices.parse("x", make_parser("", {"a": 1}), ["--device", "cpu", "--tiny", "--out", str(folder), *arguments])


def test_a_slice_goes_on_behind_the_rows_that_it_has(tmp_path: Path) -> None:
    def begin(commit: str, *arguments: str) -> Any:
        return make_slices(tmp_path, "--commit", commit, *arguments)[0].open("a", keep=lambda row: "late" in row)

    cut = begin("one")
    cut.add({"c": 1, "late": 2.0, "nested": {"x": 1}})
    cut.add({"c": 8})
    assert not begin("two").has(c=1)
    assert not begin("one", "--again").has(c=1)
    with begin("one") as part:
        assert part.has(c=1, late=2.0)
        assert not part.has(c=1, late=3.0)
        assert not part.has(c=8)
        part.add({"c": 8, "late": 1.0})
    found = json.loads((tmp_path / "x-a.json").read_text())
    assert [row["c"] for row in found["rows"]] == [1, 8]
    assert found["rows_of_earlier_runs"] == 1
    assert not begin("one").has(c=1)  # complete: measured anew if it is opened at all
