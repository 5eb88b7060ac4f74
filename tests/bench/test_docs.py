"""docs/benchmarking.md has every option of both commands, and no other."""

import re
from pathlib import Path

import pytest
import typer

from specwire.bench.metrics import measure
from specwire.bench.runner import LoadRun
from specwire.cli import app

TEXT = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")

CONNECTION = {"--address", "--api-key", "--tls-ca", "--tls-cert", "--tls-key"}


@pytest.mark.parametrize(("command", "heading"), [("serve", "Load"), ("accept", "Acceptance")])
def test_every_option_is_documented(command: str, heading: str) -> None:
    section = TEXT.partition(f"\n## {heading}: ")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `--")]
    documented = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row)}
    group = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    options = {name for parameter in group.commands[command].params for name in parameter.opts}
    assert documented == options - CONNECTION


def test_every_option_of_the_sweep_is_documented() -> None:
    section = TEXT.partition("\n## Sweep")[2].partition("\n## ")[0]
    documented = {option for line in section.splitlines() if line.startswith("| `--") for option in re.findall(r"`(--[a-z-]+)`", line.split("|")[1])}
    options = {name for parameter in typer.main.get_command(app).commands["sweep"].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert documented == options - (CONNECTION - {"--address"})


def test_every_latency_is_documented() -> None:
    documented = set(re.findall(r"^\| [^|]+ \| `([a-z0-9_]+)` \| ", TEXT, re.MULTILINE))
    assert documented == set(measure(LoadRun([], 0.0, 0.0), (50,)).latencies)
