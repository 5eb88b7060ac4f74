"""The compose stack for real, on machines with a Docker engine: part of the full matrix."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str:
    """Why there can be no drill here; empty if there can."""
    docker = shutil.which("docker")
    if docker is None:
        return "needs docker"
    for command, lack in (("version", "a Docker engine that answers"), ("compose version", "docker's compose plugin")):
        if subprocess.run([docker, *command.split()], capture_output=True, timeout=30).returncode != 0:
            return f"needs {lack}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_scaling_and_the_end(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.compose_drill", "--output", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=3500
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "compose_drill.json").read_text())
    assert len(report["killed_alone"]) == 4
    assert len(report["killed_scaled_out"]) == 9
    assert report["failures"] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_http_and_its_trace(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.compose_http", "--output", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=3500
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(json.loads((tmp_path / "compose_http.json").read_text())["trace"].values())
