"""The build hook: generates when needed, only then, and never leaves half a result."""

import subprocess
import sys
from pathlib import Path

import pytest


def build_proto(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "setup.py", "--quiet", "build_proto"], cwd=checkout, capture_output=True, text=True)


def mtimes(checkout: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (checkout / "specwire" / "v1").iterdir() if path.is_file()}


@pytest.fixture
def built(clean_copy: Path) -> Path:
    assert not (clean_copy / "specwire" / "v1").exists()
    result = build_proto(clean_copy)
    assert result.returncode == 0, result.stderr
    return clean_copy


def test_every_schema_file_gets_code_and_stubs(built: Path) -> None:
    stems = {path.stem for path in (built / "proto" / "specwire" / "v1").glob("*.proto")}
    assert {"types", "drafter", "verifier", "coordinator"} <= stems
    expected = {"__init__.py"} | {stem + suffix for stem in stems for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")}
    assert set(mtimes(built)) == expected
    assert not list(built.glob(".proto-*")), "the scratch folder was left behind"


def test_second_run_changes_nothing(built: Path) -> None:
    before = mtimes(built)
    assert build_proto(built).returncode == 0
    assert mtimes(built) == before


def test_newer_schema_is_generated_again(built: Path) -> None:
    before = mtimes(built)
    schema = built / "proto" / "specwire" / "v1" / "types.proto"
    schema.write_text(schema.read_text() + "\n// One more message.\nmessage AddedByTest {}\n")
    assert build_proto(built).returncode == 0
    after = mtimes(built)
    assert all(after[name] > before[name] for name in before)
    assert "AddedByTest" in (built / "specwire" / "v1" / "types_pb2.pyi").read_text()


def test_code_of_a_removed_schema_goes(built: Path) -> None:
    extra = built / "proto" / "specwire" / "v1" / "extra.proto"
    extra.write_text('syntax = "proto3";\n\npackage specwire.v1;\n\nmessage Extra {}\n')
    assert build_proto(built).returncode == 0
    assert "extra_pb2.py" in mtimes(built)
    extra.unlink()
    assert build_proto(built).returncode == 0
    assert not [name for name in mtimes(built) if name.startswith("extra")]


def test_broken_schema_fails_and_keeps_the_old_code(built: Path) -> None:
    before = mtimes(built)
    schema = built / "proto" / "specwire" / "v1" / "types.proto"
    schema.write_text(schema.read_text() + "\nmessage Broken { Missing field = 1; }\n")
    result = build_proto(built)
    assert result.returncode != 0
    assert "Missing" in result.stderr
    assert "types.proto" in result.stderr
    assert mtimes(built) == before


def test_missing_schema_is_named(clean_copy: Path) -> None:
    for schema in (clean_copy / "proto" / "specwire" / "v1").iterdir():
        schema.unlink()
    result = build_proto(clean_copy)
    assert result.returncode != 0
    assert "no .proto file in proto/specwire/v1" in result.stderr
