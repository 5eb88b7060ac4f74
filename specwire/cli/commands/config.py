"""`specwire config check` and `specwire config show`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey
from specwire.errors import InvalidArgumentError

commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at specwire.yaml and what it comes to.")
app.add_typer(commands, name="config")

_FILE = typer.Argument(metavar="FILE", help="Configuration file.", show_default="SPECWIRE_CONFIG's, else ./specwire.yaml")
_CONFIG = typer.Option("--config", help="As FILE.", show_default=False)


@commands.command(short_help="List every problem of a configuration file.")
def check(file: Annotated[str | None, _FILE] = None, config: Annotated[str | None, _CONFIG] = None) -> None:
    """List every problem of a configuration file; exit status 1 if there is one."""
    from specwire.cli.config import find_file
    from specwire.cli.config_check import run_check

    with exit_on_error(2):
        path = find_file(_one(file, config))
    raise typer.Exit(0 if run_check(path) else 1)


@commands.command(short_help="Show every key: its value and where it comes from.")
def show(
    file: Annotated[str | None, _FILE] = None,
    config: Annotated[str | None, _CONFIG] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any key of the file: SECTION.KEY=VALUE; may be given several times.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    running: Annotated[str, typer.Option("--address", help="A running coordinator, to show what it has clipped.", show_default=False)] = "",
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Show the value of every key of every service, where it comes from, and what is clipped and why."""
    from specwire.cli.config import read_effective, run_show

    with exit_on_error(2):
        connection = ConnectionOptions(running, api_key, tls_ca, tls_cert, tls_key) if running else None
        effective = read_effective(_one(file, config), set_ or [])
    with exit_on_error(1):
        run_show(effective, connection, as_json=json)


def _one(file: str | None, config: str | None) -> str | None:
    """Raises InvalidArgumentError if both are given."""
    if file is not None and config is not None:
        raise InvalidArgumentError(f"the file is {file}, but --config is {config}; name one of them")
    return config if file is None else file
