"""The Makefile: `check` runs every gate, and a Python that is too old is refused in words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A surrounding `make test NAME=value` must not reach the runs below.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def test_check_runs_every_gate(root: Path) -> None:
    plan = subprocess.run(["make", "--dry-run", "check"], cwd=root, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout
    for gate in ("ruff format --check", "ruff check", "mypy", "lint-imports", "buf lint"):
        assert gate in plan


def test_schema_passes_the_linter(root: Path) -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("needs buf-bin beside this Python")
    result = subprocess.run([buf, "lint"], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_old_python_is_refused(clean_copy: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\ncase "$1" in -V) echo "Python 3.10.9";; *) exit 1;; esac\n')
    old.chmod(0o755)
    result = subprocess.run(["make", f"PYTHON={old}", "proto"], cwd=clean_copy, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode != 0
    assert "needs Python 3.11 or newer" in result.stderr
    assert "3.10.9" in result.stderr
    assert not (clean_copy / ".venv").exists()


def test_missing_python_is_named(clean_copy: Path) -> None:
    result = subprocess.run(["make", "PYTHON=python-that-is-not-here", "run"], cwd=clean_copy, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode != 0
    assert "no 'python-that-is-not-here' here" in result.stderr
