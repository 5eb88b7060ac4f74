"""docs/advise.md has every option, and no other."""

import re
from pathlib import Path

import typer

from specwire.cli import app
from tests.bench.test_docs import CONNECTION

TEXT = (Path(__file__).parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")


def test_every_option_is_documented() -> None:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `--")]
    command = typer.main.get_command(app).commands["advise"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row)} == options - CONNECTION
