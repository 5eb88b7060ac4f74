"""Tables and text for people, on standard output."""

import errno
import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def make_table(header: Sequence[str], rows: Sequence[Sequence[str | Text]], *, title: str = "", num_left: int | None = None) -> Table:
    """A table.

    Args:
        header: empty = none; then there must be rows.
        num_left: so many columns are to the left, the others to the right; None = all to the left.
    """
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=bool(header))
    for index, name in enumerate(header or [""] * len(rows[0])):
        table.add_column(name, overflow="fold", justify="left" if num_left is None or index < num_left else "right")
    for row in rows:
        table.add_row(*row)
    return table


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more: an error like others, where rich would end the program, whatever runs."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console(width: int) -> Console:
    """A console as wide as the terminal; `width` columns where there is none, since a file does not fold."""
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console
