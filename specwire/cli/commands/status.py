"""`specwire status`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import Address, ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey
from specwire.config import DEFAULT_ADDRESS


@app.command()
def status(
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--once", show_default=False, help="Look again and again until Ctrl-C, or once; by default --watch in a terminal."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a look; once, unless --watch is given.")] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Show what a coordinator, its verifiers and its drafters do."""
    import sys

    from specwire.cli.status import run_status

    with exit_on_error(2):
        connection = ConnectionOptions(address, api_key, tls_ca, tls_cert, tls_key)
    with exit_on_error(1):
        run_status(connection, watch=sys.stdout.isatty() and not json if watch is None else watch, interval_s=interval, as_json=json)
