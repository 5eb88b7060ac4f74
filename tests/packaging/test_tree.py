"""The source tree: nothing generated or machine-specific is tracked, and packages look the same installed and in the checkout."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

PACKAGES = ("specwire", "drafter_svc", "verifier_svc", "coordinator")
SERVICES = ("drafter_svc", "verifier_svc", "coordinator")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".proto", ".txt", ".in", ".sh", ".cfg", ""}
# Folders that exist on one machine only: people's homes and places where some machine keeps its checkouts and packages.
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:work|root|home/\w+|Users/\w+|opt/pypi|opt/wheels|etc/xdg)(?:/|\b)")
REGISTRY_HOST = re.compile(r"(?:pypi|pythonhosted|npmjs)\.org")


def test_generated_code_is_not_tracked(root: Path, tracked_files: list[Path]) -> None:
    assert tracked_files
    assert not [path for path in tracked_files if "_pb2" in path.name or path.is_relative_to("specwire/v1")]
    ignored = subprocess.run(["git", "check-ignore", "--quiet", "specwire/v1/types_pb2.py"], cwd=root)
    assert ignored.returncode == 0, "git must ignore specwire/v1"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("cd /" + "work/main", True),
        ("open('/" + "root/x')", True),
        ("path=/" + "home/ann/src", True),
        ("/" + "opt/wheels", True),
        ("docs/home/main", False),
        ("/tmp/specwire.sock", False),
        ("~/.cache/specwire", False),
        ("the root / home of the tree", False),
    ],
)
def test_machine_path_pattern(line: str, found: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) is found


def test_no_machine_paths_or_registry_hosts(root: Path, tracked_files: list[Path]) -> None:
    hits = []
    for path in tracked_files:
        if path.suffix not in TEXT_SUFFIXES or path.name == "LICENSE" or not (root / path).is_file():
            continue
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), start=1):
            if MACHINE_PATH.search(line) or (REGISTRY_HOST.search(line) and path != Path("tests/packaging/test_tree.py")):
                hits.append(f"{path}:{number}: {line.strip()}")
    assert not hits


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_are_packages_and_typed(root: Path, package: str) -> None:
    assert (root / package / "py.typed").is_file()
    folders = {path.parent for path in (root / package).rglob("*.py")}
    assert not [str(folder.relative_to(root)) for folder in folders if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize("service", SERVICES)
def test_services_import_themselves_relatively(root: Path, service: str) -> None:
    absolute = []
    for path in (root / service).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            absolute += [f"{path.relative_to(root)}:{node.lineno}" for name in names if name.partition(".")[0] == service]
    assert not absolute
