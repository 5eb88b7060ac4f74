"""`specwire health`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import ConnectionOptions, TlsCa, TlsCert, TlsKey
from specwire.config import DEFAULT_ADDRESS


@app.command(short_help="Ask a service for its health.")
def health(
    address: Annotated[str, typer.Argument(envvar="SPECWIRE_HEALTH_ADDRESS", help="Any service: host:port or unix:path.")] = DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Ask a service for its health: status 0 if it serves, 1 if it does not or can't be reached."""
    from specwire.health import SERVING, check_health

    with exit_on_error(2):
        credentials = None
        if (tls := ConnectionOptions(address, "", tls_ca, tls_cert, tls_key).tls) is not None:
            from specwire.tls import channel_credentials

            credentials = channel_credentials(tls)
    status = check_health(address, timeout, credentials)
    if status != SERVING:
        from specwire.tls import explain_handshake

        hint = explain_handshake(status)
        status += f"; {hint}" if hint else ""
    typer.echo(f"{address}: {status}")
    raise typer.Exit(0 if status == SERVING else 1)
