"""`specwire generate`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.config import DEFAULT_PORT


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability mass that may be sampled from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens that may be sampled; 0 = all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask the prompt as a question, in the model's chat template.")] = False,
    address: Annotated[str, typer.Option(envvar="SPECWIRE_ADDRESS", help="The coordinator: host:port or unix:path.")] = f"127.0.0.1:{DEFAULT_PORT}",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with ids, usage and speculation.")] = False,
) -> None:
    """Generate text with a running coordinator."""
    from specwire.cli.generate import read_prompt, run_generate
    from specwire.sampling_params import SamplingParams

    with exit_on_error(2):
        text = read_prompt(prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ()))
    with exit_on_error(1):
        run_generate(address, text, params, as_chat=chat, as_json=json)
