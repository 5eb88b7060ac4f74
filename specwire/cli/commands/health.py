"""`specwire health`."""

from typing import Annotated

import typer

from specwire.cli.app import app
from specwire.config import DEFAULT_ADDRESS


@app.command()
def health(
    address: Annotated[str, typer.Argument(envvar="SPECWIRE_HEALTH_ADDRESS", help="Any service: host:port or unix:path.")] = DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Ask a service for its health: status 0 if it serves, 1 if it does not or can't be reached."""
    from specwire.health import SERVING, check_health

    status = check_health(address, timeout)
    typer.echo(f"{address}: {status}")
    raise typer.Exit(0 if status == SERVING else 1)
