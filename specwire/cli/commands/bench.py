"""`specwire bench`: load and acceptance."""

from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.bench_target import DEFAULT_URL, target_maker
from specwire.cli.commands.measuring import (
    AllowErrors,
    Chat,
    MaxDraftTokens,
    Output,
    OutputLen,
    PromptChoice,
    Sampling,
    Sending,
    split_names,
)
from specwire.cli.connection import ConnectionOptions, make_async_client
from specwire.cli.option_groups import grouped

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure a running coordinator.")
app.add_typer(bench, name="bench")


@bench.command(short_help="Measure latency, throughput and speculation under load.")
@grouped
def serve(
    connection: ConnectionOptions,
    sampling: Sampling,
    sending: Sending,
    backend: Annotated[str, typer.Option(help="How to call: grpc, or openai for an OpenAI-compatible HTTP API of any engine.")] = "grpc",
    base_url: Annotated[str, typer.Option(help="Of the HTTP API.", show_default=DEFAULT_URL)] = "",
    model: Annotated[str, typer.Option(help="What HTTP requests name. [default: the server's first one]", show_default=False)] = "",
    extra_body: Annotated[str, typer.Option(help="JSON object: what HTTP requests have besides.", show_default=False)] = "",
    prompts: Annotated[Path | None, typer.Option(help="JSONL file with `prompt` or `turns`. [default: made-up token ids]")] = None,
    chat: Chat = False,
    input_len: Annotated[int, typer.Option(help="Tokens of a made-up prompt.")] = 128,
    output_len: OutputLen = 128,
    length_distribution: Annotated[str, typer.Option(help="Of made-up prompts and their answers: fixed, uniform or lognormal.")] = "fixed",
    length_spread: Annotated[float, typer.Option(help="uniform: mean x (1 - spread) to mean x (1 + spread); lognormal: sigma.")] = 0.5,
    prefix_len: Annotated[int, typer.Option(help="Tokens that all made-up prompts begin with, on top of input-len.")] = 0,
    num_prompts: Annotated[int | None, typer.Option(help="Requests that are measured. [default: the file's prompts, or 100]")] = None,
    request_rate: Annotated[float, typer.Option(help="Requests a second, as a Poisson process; inf = all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="Shape of the gamma-distributed gaps: 1 = Poisson, below 1 = bursts.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests at once; without a rate a closed loop. [default: no limit]")] = None,
    warmup: Annotated[int, typer.Option(help="Requests that are sent before and count nowhere.")] = 0,
    max_draft_tokens: MaxDraftTokens = None,
    vocab_size: Annotated[int, typer.Option(help="Ids of made-up prompts end here; 0 = the served tokenizer's.")] = 0,
    percentiles: Annotated[str, typer.Option(help="Of all latencies, with commas between them.")] = "50,90,95,99",
    goodput: Annotated[list[str] | None, typer.Option(help='Most milliseconds of a good request, such as "ttft:200 tpot:50 e2el:3000".')] = None,
    output: Output = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="The report has the raw times of every request.")] = False,
    allow_errors: AllowErrors = False,
) -> None:
    """Put load on a coordinator, or an HTTP server, and measure latency, throughput and speculation. Ctrl-C shows what was measured so far."""
    with exit_on_error(2):
        from specwire.bench.serve import read_lines, run_serve
        from specwire.bench.serve_options import ServeOptions
        from specwire.bench.statistics import Objective, parse_percentiles
        from specwire.bench.workload import Lengths

        where, make_target = target_maker(connection, backend=backend, base_url=base_url, model=model, extra_body=extra_body, is_chat=chat)
        options = ServeOptions(
            address=where,
            prompts=prompts,
            chat=chat,
            lengths=Lengths(input_len, output_len, length_distribution, length_spread, prefix_len),
            num_prompts=num_prompts,
            request_rate=request_rate,
            burstiness=burstiness,
            max_concurrency=max_concurrency,
            num_warmups=warmup,
            seed=sampling.seed,
            params=sampling.params(max_draft_tokens),
            vocab_size=vocab_size,
            timeout_s=sending.timeout,
            max_retries=sending.retries,
            ready_timeout_s=sending.ready_timeout,
            percentiles=parse_percentiles(percentiles),
            objective=Objective.parse(goodput or []),
            output=output,
            save_detailed=save_detailed,
            allow_errors=allow_errors,
        )
        lines = read_lines(options)
    with exit_on_error(1):
        status = run_serve(options, lines, make_target)
    raise typer.Exit(status)


@bench.command(short_help="Measure how many drafts are accepted, by category.")
@grouped
def accept(
    choice: PromptChoice,
    connection: ConnectionOptions,
    sampling: Sampling,
    sending: Sending,
    output_len: OutputLen = 256,
    max_concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    max_draft_tokens: MaxDraftTokens = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Answer everything again without drafts and compare the tokens.")] = False,
    output: Output = None,
    allow_errors: Annotated[bool, typer.Option("--allow-errors", help="Exit with status 0 in spite of failed requests or differences.")] = False,
) -> None:
    """Measure how many drafts a coordinator accepts, by category and weight, and how well the drafter's scores predict it."""
    with exit_on_error(2):
        from specwire.bench.accept import AcceptOptions, parse_weights, read_lines, run_accept

        options = AcceptOptions(
            address=connection.address,
            prompts=choice.prompts,
            chat=choice.chat,
            categories=split_names(choice.categories),
            weights=parse_weights(choice.weights),
            num_prompts=choice.num_prompts,
            max_tokens=output_len,
            params=sampling.params(max_draft_tokens),
            max_concurrency=max_concurrency,
            timeout_s=sending.timeout,
            max_retries=sending.retries,
            ready_timeout_s=sending.ready_timeout,
            baseline=baseline,
            output=output,
            allow_errors=allow_errors,
        )
        lines = read_lines(options)
    with exit_on_error(1):
        status = run_accept(options, lines, lambda: make_async_client(connection))
    raise typer.Exit(status)
