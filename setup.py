"""Build hook: makes `specwire/v1/*_pb2*.py` and `.pyi` from `proto/specwire/v1/*.proto` whenever the package is built or installed."""

import shutil
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
PACKAGE = "specwire.v1"
PROTO_DIR = ROOT / "proto" / "specwire" / "v1"
OUT_DIR = ROOT / "specwire" / "v1"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def expected_files(protos: list[Path]) -> list[Path]:
    """The files that a complete generation leaves in `OUT_DIR`."""
    return [OUT_DIR / "__init__.py", *(OUT_DIR / f"{proto.stem}{suffix}" for proto in protos for suffix in SUFFIXES)]


def is_fresh(protos: list[Path]) -> bool:
    """True if every output exists, none is older than its schema or this hook, and none is left over from a removed schema."""
    outputs = expected_files(protos)
    if not OUT_DIR.is_dir() or {path for path in OUT_DIR.iterdir() if path.suffix in (".py", ".pyi")} != set(outputs):
        return False
    oldest_output = min(path.stat().st_mtime for path in outputs)
    newest_input = max(path.stat().st_mtime for path in [*protos, PROTO_DIR, Path(__file__)])
    return oldest_output >= newest_input


def generate(protos: list[Path]) -> None:
    """Runs protoc in a scratch folder and moves the results into place, so that a failed run leaves the old code usable."""
    from grpc_tools import protoc  # heavy, and absent where only metadata is asked for

    # The package path is the folder path is the import path: with -I at proto/, no import needs rewriting.
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".proto-") as scratch:
        includes = [f"-I{ROOT / 'proto'}", f"-I{files('grpc_tools') / '_proto'}"]
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", *includes, *outputs, *map(str, protos)]) != 0:
            raise ExecError(f"protoc could not compile the schema in {PROTO_DIR.relative_to(ROOT)}: see its messages above")
        made = Path(scratch, *PACKAGE.split("."))
        header = f'"""Generated from proto/specwire/v1 with grpcio-tools {version("grpcio-tools")}: edit the schema, never this folder."""\n'
        (made / "__init__.py").write_text(header, encoding="utf-8")
        OUT_DIR.mkdir(parents=True, exist_ok=True)
        wanted = set(expected_files(protos))
        for old in [path for path in OUT_DIR.iterdir() if path.is_file() and path not in wanted]:
            old.unlink()
        for path in made.iterdir():
            shutil.move(path, OUT_DIR / path.name)


class BuildProto(Command):
    """`python setup.py build_proto`: generates the code if it is missing or older than the schema."""

    description = "generate specwire/v1 from proto/specwire/v1"
    user_options: ClassVar = [("force", "f", "generate even if nothing changed")]
    boolean_options: ClassVar = ["force"]

    def initialize_options(self) -> None:
        self.force = False

    def finalize_options(self) -> None:
        """Nothing depends on other commands' options."""

    def run(self) -> None:
        protos = sorted(PROTO_DIR.glob("*.proto"))
        if not protos:
            raise ExecError(f"no .proto file in {PROTO_DIR.relative_to(ROOT)}: build from a complete checkout or source archive")
        if self.force or not is_fresh(protos):
            generate(protos)


class BuildPy(build_py):
    """Generates first and then packs `specwire.v1`, which package discovery cannot have seen in a clean checkout."""

    def run(self) -> None:
        self.run_command("build_proto")
        if PACKAGE not in self.packages:
            self.packages = [*self.packages, PACKAGE]
        super().run()


setup(cmdclass={"build_proto": BuildProto, "build_py": BuildPy})
