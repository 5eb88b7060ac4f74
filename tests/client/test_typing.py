"""The public names are typed: a program that uses all of them, the examples and the documentation's programs pass `mypy --strict`."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).resolve().parents[2]


def test_programs_are_well_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    documented = []
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        documented.append(tmp_path / f"client_md_{number}.py")
        documented[-1].write_text(program, encoding="utf-8")
    assert documented
    # As a user would check it, without the project's own settings; what mypy finds out about the package is kept for the next time.
    options = ["--config-file=", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "strict")]
    programs = [str(path) for path in (ROOT / "tests" / "client" / "typed_program.py", *sorted((ROOT / "examples").glob("*.py")), *documented)]
    output, errors, status = api.run([*options, *programs])
    assert status == 0, output + errors
