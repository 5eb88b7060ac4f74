"""Requirements, pins and the generator's version agree with one another."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


@pytest.fixture(scope="module")
def pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, Version]:
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9a-z.]+", line) for line in lines), "pins only: no hosts, paths or local builds"
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def test_every_requirement_is_pinned_within_its_bounds(pyproject: dict[str, Any], pins: dict[str, Version]) -> None:
    extras = pyproject["project"]["optional-dependencies"].values()
    requirements = [
        Requirement(line) for group in [pyproject["project"]["dependencies"], pyproject["build-system"]["requires"], *extras] for line in group
    ]
    unpinned = [str(requirement) for requirement in requirements if canonicalize_name(requirement.name) not in pins]
    assert not unpinned
    outside = [str(requirement) for requirement in requirements if pins[canonicalize_name(requirement.name)] not in requirement.specifier]
    assert not outside


def test_generator_is_pinned_and_is_the_floor_of_the_runtime(root: Path, pyproject: dict[str, Any], pins: dict[str, Version]) -> None:
    build = {Requirement(line).name: Requirement(line) for line in pyproject["build-system"]["requires"]}
    runtime = {Requirement(line).name: Requirement(line) for line in pyproject["project"]["dependencies"]}
    generator = pins["grpcio-tools"]
    assert str(build["grpcio-tools"].specifier) == f"=={generator}"
    assert f">={generator}" in str(runtime["grpcio"].specifier)
    # The generated code checks the runtime when it is imported: the requirement must promise what the code asks for.
    code = (root / "specwire" / "v1" / "types_pb2.py").read_text()
    asked = re.search(r"# Protobuf Python Version: ([0-9.]+)", code)
    assert asked, "the generated code no longer names the protobuf version that it needs"
    assert f">={asked[1]}" in str(runtime["protobuf"].specifier)
