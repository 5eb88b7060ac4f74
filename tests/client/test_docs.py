"""docs/client.md: its programs run as they are, and its tables name what there is."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import specwire
from specwire import Choice, Client, SamplingParams, StreamEvent
from specwire.client import DEFAULT_ADDRESS
from tests.client.served import Served, served

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
PROGRAMS = {
    section.splitlines()[0]: block
    for section in re.split(r"^#+ ", TEXT, flags=re.MULTILINE)
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder, served(Path(folder)) as coordinator:
        yield coordinator


def test_there_is_a_program_for_each_topic() -> None:
    assert len(PROGRAMS) == len(re.findall("^```python", TEXT, re.MULTILINE)) >= 9


@pytest.mark.parametrize("section", PROGRAMS)
def test_programs_run(coordinator: Served, section: str) -> None:
    program = PROGRAMS[section]
    assert DEFAULT_ADDRESS in program
    before = len(coordinator.requests)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program.replace(DEFAULT_ADDRESS, coordinator.address), section, "exec"), {"__name__": "__main__"})
    if section == "Errors":
        assert "unknown sampling parameter temprature; did you mean temperature?" in output.getvalue()
    else:
        assert len(coordinator.requests) > before
        assert "failed" not in output.getvalue()


def table(section: str) -> list[str]:
    """First cells of the rows of a section's table, code marks removed."""
    rows = re.findall(r"^\| (.*?) \|", TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0], re.MULTILINE)
    return [name.strip("`") for row in rows[1:] for name in row.split(", ")]


def test_arguments_of_a_client() -> None:
    assert table("A client") == list(inspect.signature(Client).parameters)


def test_sampling_parameters() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \| .+ \|$", TEXT.partition("\n### Sampling parameters\n")[2].partition("\n## ")[0], re.MULTILINE)
    defaults = SamplingParams()
    expected = [(field.name, getattr(defaults, field.name)) for field in dataclasses.fields(SamplingParams)]
    assert [(name, ast.literal_eval(default)) for name, default in rows] == expected


def test_attributes_of_a_choice() -> None:
    fields = {field.name for field in dataclasses.fields(Choice)} - {"decoded", "index", "error"} | {"text"}
    assert set(table("Results")) == fields
    assert all(f"`{field.name}`" in TEXT for field in dataclasses.fields(StreamEvent) if field.name not in ("pieces",))


def test_errors() -> None:
    named = set(table("Errors"))
    # What only services raise, or stands for the whole family.
    others = {"SpecwireError", "CancelledError", "AbortedError"}
    assert named | others == {name for name in specwire.__all__ if name.endswith("Error")}


def test_public_names_can_all_be_imported() -> None:
    for name in specwire.__all__:
        assert getattr(specwire, name).__module__.startswith(("specwire", "typing", "types")), name
