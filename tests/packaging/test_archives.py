"""Source archive and wheel: what is in them, and that the wheel's code runs away from the checkout."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("specwire", "drafter_svc", "verifier_svc", "coordinator")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, checkout: Path, target: Path) -> Path:
    """Builds as pip would, but with the tools that are installed, since tests use no network."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture
def sdist(clean_copy: Path, tmp_path: Path) -> Path:
    return build("sdist", clean_copy, tmp_path)


@pytest.fixture
def wheel(sdist: Path, tmp_path: Path) -> Path:
    """Built from the unpacked source archive, so that it proves the archive complete too."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    return build("wheel", next((tmp_path / "unpacked").iterdir()), tmp_path)


def test_source_archive_has_the_schema_and_nothing_generated(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    schemas = {str(path.relative_to(root)) for path in (root / "proto").rglob("*.proto")}
    assert schemas
    assert schemas <= names
    assert not [name for name in names if "_pb2" in name or "__pycache__" in name]


def test_wheel_is_complete_and_runs(wheel: Path, root: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(installed)
    sources = {path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*.py")}
    generated = {
        Path("specwire/v1", path.stem + suffix)
        for path in (root / "proto" / "specwire" / "v1").glob("*.proto")
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    }
    page = {path.relative_to(root) for path in (root / "specwire" / "http" / "page").iterdir() if path.is_file()}
    missing = {str(path) for path in sources | generated | page | {Path(package, "py.typed") for package in PACKAGES}} - names
    assert not missing
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == set(PACKAGES), "the wheel must add these import names and no others"

    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    dist_info = installed / f"specwire-{version}.dist-info"
    assert "specwire = specwire.cli:main" in (dist_info / "entry_points.txt").read_text()
    assert "License-Expression: Apache-2.0" in (dist_info / "METADATA").read_text()
    assert (dist_info / "licenses" / "LICENSE").is_file()

    # The folder comes first on the path, so the checkout's own copy cannot stand in for it.
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "from specwire.v1 import coordinator_pb2, drafter_pb2_grpc, verifier_pb2_grpc\n"
        "print(coordinator_pb2.__file__)"
    )
    result = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == installed / "specwire" / "v1" / "coordinator_pb2.py"
