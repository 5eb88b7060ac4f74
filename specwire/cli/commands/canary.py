"""`specwire canary`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import Address, ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey
from specwire.config import DEFAULT_ADDRESS

canary = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Another configuration of speculation for a share of the requests.")
app.add_typer(canary, name="canary")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Percent = Annotated[float, typer.Option(min=0, max=100, help="Percentage of the requests; 0 = only those that ask for it.")]


@canary.callback()
def group() -> None:
    """Another configuration of speculation for a share of the requests."""


@canary.command()
def start(
    config: Annotated[str, typer.Argument(metavar="JSON", help="What is different: num_speculative_tokens, num_speculative_tokens_per_batch_size.")],
    percent: Percent = 10.0,
    json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Begin a canary."""
    _change("START", address, api_key, tls_ca, tls_cert, tls_key, percent=percent, config=config, json=json)


@canary.command()
def share(
    percent: Annotated[float, typer.Argument(min=0, max=100, metavar="PERCENT", help="Percentage of the requests; 0 = only those that ask for it.")],
    json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Give the canary another share."""
    _change("SET_SHARE", address, api_key, tls_ca, tls_cert, tls_key, percent=percent, json=json)


@canary.command()
def promote(
    json: Json = False, address: Address = DEFAULT_ADDRESS, api_key: ApiKey = "", tls_ca: TlsCa = "", tls_cert: TlsCert = "", tls_key: TlsKey = ""
) -> None:
    """Give all requests the canary's configuration, those that run too."""
    _change("PROMOTE", address, api_key, tls_ca, tls_cert, tls_key, json=json)


@canary.command()
def rollback(
    json: Json = False, address: Address = DEFAULT_ADDRESS, api_key: ApiKey = "", tls_ca: TlsCa = "", tls_cert: TlsCert = "", tls_key: TlsKey = ""
) -> None:
    """Give the canary's requests the configuration of all others."""
    _change("ROLL_BACK", address, api_key, tls_ca, tls_cert, tls_key, json=json)


@canary.command()
def status(
    json: Json = False, address: Address = DEFAULT_ADDRESS, api_key: ApiKey = "", tls_ca: TlsCa = "", tls_cert: TlsCert = "", tls_key: TlsKey = ""
) -> None:
    """Show what both configurations came to so far."""
    from specwire.cli.canary import show_canary

    with exit_on_error(2):
        connection = ConnectionOptions(address, api_key, tls_ca, tls_cert, tls_key)
    with exit_on_error(1):
        show_canary(connection, as_json=json)


def _change(action: str, *connection: str, json: bool, percent: float = 0.0, config: str = "") -> None:
    from specwire.cli.canary import change_canary
    from specwire.messages import CanaryAction

    with exit_on_error(2):
        options = ConnectionOptions(*connection)
    with exit_on_error(1):
        change_canary(options, CanaryAction[action], percent / 100, config, as_json=json)
