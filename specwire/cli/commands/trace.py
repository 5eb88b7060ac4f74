"""`specwire trace`."""

from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error


@app.command(short_help="Show traces from a file.")
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What the services' --trace-file named.")],
    request: Annotated[str, typer.Option("--request", help="Show the traces of requests with this id.")] = "",
    trace_id: Annotated[str, typer.Option("--trace-id", help="Show the trace whose id begins with these hexadecimal digits.")] = "",
    last: Annotated[bool, typer.Option("--last", help="Show the trace that began last.")] = False,
) -> None:
    """Show traces from a file: what each request waited for, in every service. Without an option: a list of the traces."""
    from specwire.cli.trace import run_trace

    with exit_on_error(1):
        run_trace(file, request_id=request, trace_id=trace_id, last=last)
