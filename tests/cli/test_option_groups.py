"""Dataclasses as options."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from specwire.cli.option_groups import grouped
from specwire.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Size:
    width: Annotated[int, typer.Option(help="Of it.")]
    height: Annotated[int, typer.Option(envvar="SPECWIRE_TEST_HEIGHT", help="Of it.")] = 3

    def __post_init__(self) -> None:
        if self.width > 100:
            raise InvalidArgumentError(f"--width is {self.width}, but must be at most 100")


app = typer.Typer()
seen: list[object] = []


@app.command()
@grouped
def draw(size: Size, name: Annotated[str, typer.Argument()], color: str = "red") -> None:
    """Draws it."""
    seen.append((size, name, color))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "--width", "2"], (Size(2, 3), "a", "red")),
        (["--height", "5", "b", "--width", "2", "--color", "blue"], (Size(2, 5), "b", "blue")),
    ],
)
def test_fields_are_options(arguments: list[str], expected: tuple[object, ...]) -> None:
    seen.clear()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert seen == [expected]


def test_what_an_option_has_holds_for_a_field() -> None:
    seen.clear()
    assert CliRunner().invoke(app, ["a", "--width", "2"], env={"SPECWIRE_TEST_HEIGHT": "9"}).exit_code == 0
    assert seen == [(Size(2, 9), "a", "red")]
    help_text = CliRunner().invoke(app, ["--help"]).output
    assert "--width" in help_text
    assert "Draws it." in help_text
    assert "--size" not in help_text


@pytest.mark.parametrize(
    ("arguments", "words"), [(["a"], "--width"), (["a", "--width", "101"], "must be at most 100"), (["a", "--width", "x"], "--width")]
)
def test_wrong_ones_end_with_status_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr
