"""Tables and text for people, on standard output."""

from rich.console import Console


def make_console(width: int) -> Console:
    """A console as wide as the terminal; `width` columns where there is none, since a file does not fold."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console
