"""`specwire advise`."""

from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.commands.measuring import (
    AllowErrors,
    Categories,
    Chat,
    IgnoreEos,
    OutputLen,
    PromptFile,
    PromptsPerCategory,
    ReadyTimeout,
    Retries,
    Seed,
    Temperature,
    Timeout,
    TopK,
    TopP,
    Weights,
    split_names,
)
from specwire.cli.connection import Address, ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey, make_async_client
from specwire.config import DEFAULT_ADDRESS


@app.command()
def advise(
    prompts: PromptFile,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    chat: Chat = False,
    categories: Categories = "",
    weights: Weights = "",
    num_prompts: PromptsPerCategory = None,
    output_len: OutputLen = 256,
    max_concurrency: Annotated[int, typer.Option(help="Requests at once while acceptance is measured.")] = 8,
    concurrency: Annotated[str, typer.Option(help="Requests at once while steps are measured, with commas between them. [default: 1,4,16,...]")] = "",
    step_len: Annotated[int, typer.Option(help="Tokens of each answer while steps are measured.")] = 64,
    repeats: Annotated[int, typer.Option(help="How often each kind of step is measured.")] = 3,
    min_gain: Annotated[float, typer.Option(help="Share of throughput that is worth neither drafts nor a range of its own.")] = 0.02,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    ignore_eos: IgnoreEos = False,
    timeout: Timeout = None,
    retries: Retries = 0,
    ready_timeout: ReadyTimeout = 10.0,
    output: Annotated[Path, typer.Option(help="Folder for advice.json, specwire.yaml and advice.png.")] = Path("advice"),
    allow_errors: AllowErrors = False,
) -> None:
    """Measure acceptance and cost on a running stack, and find how many drafts to verify at each batch size, if any."""
    with exit_on_error(2):
        from specwire.advise.command import read_lines, run_advise
        from specwire.advise.options import AdviseOptions, parse_concurrencies
        from specwire.bench.accept import AcceptOptions, parse_weights
        from specwire.sampling_params import SamplingParams

        connection = ConnectionOptions(address, api_key, tls_ca, tls_cert, tls_key)
        options = AdviseOptions(
            accept=AcceptOptions(
                address=address,
                prompts=prompts,
                chat=chat,
                categories=split_names(categories),
                weights=parse_weights(weights),
                num_prompts=num_prompts,
                max_tokens=output_len,
                params=SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, ignore_eos=ignore_eos),
                max_concurrency=max_concurrency,
                timeout_s=timeout,
                max_retries=retries,
                ready_timeout_s=ready_timeout,
                allow_errors=allow_errors,
            ),
            output=output,
            concurrencies=parse_concurrencies(concurrency),
            step_len=step_len,
            repeats=repeats,
            min_gain=min_gain,
        )
        lines = read_lines(options)
    with exit_on_error(1):
        status = run_advise(options, lines, lambda: make_async_client(connection))
    raise typer.Exit(status)
