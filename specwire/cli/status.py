"""`specwire status`: asks a coordinator for its state, once or again and again."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specwire.cli.connection import ConnectionOptions, hint_at_up, make_client
from specwire.cli.status_view import render
from specwire.console import make_console
from specwire.errors import DeadlineExceededError, UnavailableError
from specwire.messages import CoordinatorStatus

_FILE_WIDTH = 140  # columns of tables where there is no terminal
Look = CoordinatorStatus | UnavailableError | DeadlineExceededError


def run_status(connection: ConnectionOptions, *, watch: bool, interval_s: float, as_json: bool) -> None:
    """Prints tables, or a JSON object a look.

    Raises:
        UnavailableError: there is no coordinator; while watching it is waited for instead.
        SpecwireError: it refuses.
    """
    console = make_console(_FILE_WIDTH)
    with make_client(connection) as client:
        if not watch:
            with hint_at_up():
                look = client.get_status()
            _print(console, look, None, as_json=as_json)
            return
        looks = look_again(client.get_status, lambda: time.sleep(interval_s))
        try:
            if as_json or not console.is_terminal:
                print_looks(console, looks, as_json=as_json)
            else:
                show_live(console, looks)
        except KeyboardInterrupt:
            return


def look_again(ask: Callable[[], CoordinatorStatus], wait: Callable[[], None]) -> Iterator[Look]:
    """One look after the other, for ever; a coordinator that is away is the error that says so."""
    while True:
        try:
            look: Look = ask()
        except (UnavailableError, DeadlineExceededError) as error:
            look = error
        yield look
        wait()


def print_looks(console: Console, looks: Iterable[Look], *, as_json: bool) -> None:
    """One below the other; what keeps the coordinator from answering goes to stderr."""
    before: CoordinatorStatus | None = None
    for look in looks:
        if isinstance(look, CoordinatorStatus):
            _print(console, look, before, as_json=as_json)
            before = look
        else:
            typer.echo(_away(look), err=True)


def show_live(console: Console, looks: Iterable[Look]) -> None:
    """In place. While the coordinator is away, what was seen last stays below the reason why it is not newer."""
    before: CoordinatorStatus | None = None
    shown: RenderableType = Text("")
    with Live(shown, console=console, auto_refresh=False) as live:
        for look in looks:
            if isinstance(look, CoordinatorStatus):
                shown, before = render(look, before), look
                live.update(shown, refresh=True)
            else:
                live.update(Group(Text(_away(look), style="red"), shown), refresh=True)


def _print(console: Console, status: CoordinatorStatus, before: CoordinatorStatus | None, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(status), ensure_ascii=False))
    else:
        console.print(render(status, before))


def _away(error: Exception) -> str:
    return f"specwire: {error}; trying again"
