"""Writes what each kind of image installs, read from pyproject.toml: base.txt, engine.txt (CPU) and gpu.txt."""

import re
import tomllib
from pathlib import Path

_NOT_AT_RUN_TIME = {"transformers"}  # the tests' reference
_ONLY_ON_GPUS = {"triton"}


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    engine = {_name(requirement): requirement for requirement in project["optional-dependencies"]["engine"]}
    gpu = engine.keys() - _NOT_AT_RUN_TIME
    _write("base.txt", project["dependencies"])
    _write("gpu.txt", [engine[name] for name in sorted(gpu)])
    _write("engine.txt", [engine[name] for name in sorted(gpu - _ONLY_ON_GPUS)])


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, f"{requirement!r} names no package"
    return match[0].lower()


def _write(name: str, requirements: list[str]) -> None:
    Path(name).write_text("".join(f"{requirement}\n" for requirement in requirements), encoding="utf-8")


if __name__ == "__main__":
    main()
