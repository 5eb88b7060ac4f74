"""`specwire canary`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import ConnectionOptions
from specwire.cli.option_groups import grouped

canary = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Another speculation for a share of the requests.")
app.add_typer(canary, name="canary")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Percent = Annotated[float, typer.Option(min=0, max=100, help="Percentage of the requests; 0 = only those that ask for it.")]


@canary.callback()
def group() -> None:
    """Another configuration of speculation for a share of the requests."""


@canary.command()
@grouped
def start(
    connection: ConnectionOptions,
    config: Annotated[str, typer.Argument(metavar="JSON", help="What is different: K, its schedule, enable_adaptive_verification, method.")],
    percent: Percent = 10.0,
    json: Json = False,
) -> None:
    """Begin a canary."""
    from specwire.speculative_config import read_keys

    with exit_on_error(2):
        read_keys(config)
    _change("START", connection, percent=percent, config=config, json=json)


@canary.command()
@grouped
def share(
    connection: ConnectionOptions,
    percent: Annotated[float, typer.Argument(min=0, max=100, metavar="PERCENT", help="Percentage of the requests; 0 = only those that ask for it.")],
    json: Json = False,
) -> None:
    """Give the canary another share."""
    _change("SET_SHARE", connection, percent=percent, json=json)


@canary.command(short_help="Give all requests the canary's configuration.")
@grouped
def promote(connection: ConnectionOptions, json: Json = False) -> None:
    """Give all requests the canary's configuration, those that run too."""
    _change("PROMOTE", connection, json=json)


@canary.command()
@grouped
def rollback(connection: ConnectionOptions, json: Json = False) -> None:
    """Give the canary's requests the configuration of all others."""
    _change("ROLL_BACK", connection, json=json)


@canary.command()
@grouped
def status(connection: ConnectionOptions, json: Json = False) -> None:
    """Show what both configurations came to so far."""
    from specwire.cli.canary import show_canary

    with exit_on_error(1):
        show_canary(connection, as_json=json)


def _change(action: str, connection: ConnectionOptions, *, json: bool, percent: float = 0.0, config: str = "") -> None:
    from specwire.cli.canary import change_canary
    from specwire.messages import CanaryAction

    with exit_on_error(1):
        change_canary(connection, CanaryAction[action], percent / 100, config, as_json=json)
