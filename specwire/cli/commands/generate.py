"""`specwire generate`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.connection import Address, ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey
from specwire.config import DEFAULT_ADDRESS


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability mass that may be sampled from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens that may be sampled; 0 = all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")] = None,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Most drafts verified in a step; 0 = no speculation. [default: the server's K]")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to the prompt, each sampled for itself.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds that everything may take. [default: no limit]")] = None,
    request_id: Annotated[str, typer.Option(help="Label of the request in logs and traces.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Ask the prompt as a question, in the model's chat template.")] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with ids, usage and speculation.")] = False,
) -> None:
    """Generate text with a running coordinator."""
    from specwire.cli.generate import check_call, read_prompt, run_generate
    from specwire.sampling_params import SamplingParams

    with exit_on_error(2):
        connection = ConnectionOptions(address, api_key, tls_ca, tls_cert, tls_key)
        text = read_prompt(prompt)
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ()),
            max_draft_tokens=max_draft_tokens,
        )  # fmt: skip
        check_call(timeout, request_id)
    with exit_on_error(1):
        run_generate(connection, text, params, timeout=timeout, request_id=request_id, as_chat=chat, as_json=json)
