"""The base install: SDK, CLI and coordinator load without torch, triton, transformers or safetensors."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ENGINE_ONLY = ("torch", "triton", "transformers", "safetensors")

# Runs in a process of its own: refuses the engine's dependencies, records who asks for one (even inside try/except), imports
# every module that must work without them, and reports the names that were imported and those that were asked for.
PROBE = """
import importlib, json, pkgutil, sys

refused = {refused!r}
asked = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}} (refused by the test)", name=name)

sys.meta_path.insert(0, Refuse())
{extra}

def walk(package):
    yield package.__name__
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if info.name in ("specwire.engine", "specwire.train") or info.name.endswith(".__main__"):
            continue
        module = importlib.import_module(info.name)
        if info.ispkg:
            yield from walk(module)
        else:
            yield info.name

imported = [name for package in ("specwire", "coordinator") for name in walk(importlib.import_module(package))]
print(json.dumps({{"imported": imported, "asked": asked}}))
"""


def run_probe(root: Path, extra: str = "") -> dict[str, list[str]]:
    program = PROBE.format(refused=ENGINE_ONLY, extra=extra)
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_library_and_coordinator_import_without_the_engine(root: Path) -> None:
    probe = run_probe(root, "import specwire\nfor name in specwire.__all__:\n    getattr(specwire, name)")
    assert not probe["asked"]
    assert {"specwire.errors", "specwire.v1.types_pb2", "specwire.client.batch", "coordinator"} <= set(probe["imported"])


def test_probe_notices_an_engine_import(root: Path) -> None:
    result = run_probe(root, "try:\n    import torch\nexcept ImportError:\n    pass")
    assert result["asked"] == ["torch"]


def test_base_requirements_name_no_engine_package(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    base = {Requirement(line).name for line in project["dependencies"]}
    engine = {Requirement(line).name for line in project["optional-dependencies"]["engine"]}
    assert not base & set(ENGINE_ONLY)
    assert set(ENGINE_ONLY) <= engine
