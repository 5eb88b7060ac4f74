"""`specwire chat`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import Address, ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey, make_client
from specwire.config import DEFAULT_ADDRESS


@app.command(short_help="Talk with the served model.")
def chat(
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability mass that may be sampled from.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """Talk with the served model: each line of standard input is a question."""
    from specwire.cli.chat import run_chat
    from specwire.sampling_params import SamplingParams

    with exit_on_error(2):
        connection = ConnectionOptions(address, api_key, tls_ca, tls_cert, tls_key)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with exit_on_error(1), make_client(connection) as client:
        all_answered = run_chat(client, params, system)
    raise typer.Exit(0 if all_answered else 1)
