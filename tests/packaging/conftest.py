"""Fixtures of the packaging tests: the checkout and clean copies of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = ("specwire", "drafter_svc", "verifier_svc", "coordinator")
SOURCE_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "Makefile", "buf.yaml")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked_files(root: Path) -> list[Path]:
    """Files that git tracks, relative to the checkout."""
    if not (root / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name]


@pytest.fixture
def clean_copy(root: Path, tmp_path: Path) -> Path:
    """What a build reads, copied without anything generated."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCE_FILES:
        shutil.copy2(root / name, copy / name)
    shutil.copytree(root / "proto", copy / "proto")
    for package in PACKAGES:
        shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "specwire" / "v1", ignore_errors=True)
    return copy
