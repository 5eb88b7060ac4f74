"""`specwire batch`."""

from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import Address, ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey, hint_at_up, make_async_client
from specwire.config import DEFAULT_ADDRESS


@app.command(short_help="Answer a file of requests.")
def batch(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Requests, one JSON object a line; - reads them from standard input.")],
    output: Annotated[Path | None, typer.Option(help="File for the results.", show_default="standard output")] = None,
    max_concurrency: Annotated[int, typer.Option(help="Most requests that run at once.")] = 32,
    keep_order: Annotated[bool, typer.Option("--keep-order", help="Results in the order of the requests, not of their ends.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the output has an answer for, and append to it.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate, where a line does not say.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature, where a line does not say.")] = 0.0,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Answer a file of requests; exit status 1 if one of them failed."""
    from specwire.cli.batch import BatchOptions, run_batch
    from specwire.sampling_params import SamplingParams

    with exit_on_error(2):
        connection = ConnectionOptions(address, api_key, tls_ca, tls_cert, tls_key)
        defaults = {"max_tokens": max_tokens, "temperature": temperature}
        SamplingParams(**defaults)  # type: ignore[arg-type]  # says now what is wrong with them
        options = BatchOptions(None if file == "-" else Path(file), output, max_concurrency, keep_order, resume, defaults)
    with exit_on_error(1), hint_at_up():
        tally = run_batch(lambda: make_async_client(connection), options)
    raise typer.Exit(1 if tally.num_failed else 0)
