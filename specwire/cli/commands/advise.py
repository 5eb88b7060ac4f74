"""`specwire advise`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.commands.measuring import AllowErrors, OutputLen, PromptChoice, Sampling, Sending, split_names
from specwire.cli.connection import ConnectionOptions, make_async_client
from specwire.cli.option_groups import grouped


@dataclasses.dataclass(frozen=True, slots=True)
class ThresholdOptions:
    """`specwire.advise.options.Thresholds` as options."""

    min_gain: Annotated[float, typer.Option(help="Share of throughput that is worth neither drafts nor a range of its own.")] = 0.02
    min_acceptance_length: Annotated[float, typer.Option(help="Mean acceptance length below which it stops and says no.")] = 1.5
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on below --min-acceptance-length, too.")] = False
    min_tpot_gain: Annotated[float, typer.Option(help="Share of the time per token that must be saved to say yes.")] = 0.3
    max_loss: Annotated[float, typer.Option(help="Share of throughput, or of the time per token, up to which it is not worse.")] = 0.02
    bound_share: Annotated[float, typer.Option(help="Share by which twice the tokens may lengthen a step that is bound by latency.")] = 0.5
    canary_percent: Annotated[float, typer.Option(help="Percentage of the requests that the canary begins with.")] = 10.0


@app.command(short_help="Measure whether drafts pay for your prompts, and how many.")
@grouped
def advise(
    choice: PromptChoice,
    connection: ConnectionOptions,
    sampling: Sampling,
    sending: Sending,
    thresholds: ThresholdOptions,
    candidate: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="A coordinator of the same model with other drafters to choose from; repeatable.")
    ] = None,
    output_len: OutputLen = 256,
    max_concurrency: Annotated[int, typer.Option(help="Requests at once while acceptance is measured.")] = 8,
    concurrency: Annotated[str, typer.Option(help="Requests at once while steps are measured, with commas between them. [default: 1,4,16,...]")] = "",
    step_len: Annotated[int, typer.Option(help="Tokens of each answer while steps are measured.")] = 64,
    repeats: Annotated[int, typer.Option(help="How often each kind of step, and each rate, is measured.")] = 3,
    low_rate: Annotated[float | None, typer.Option(help="Requests a second of quiet hours. [default: 0.25 x what plain decoding can serve]")] = None,
    high_rate: Annotated[float | None, typer.Option(help="Requests a second of busy hours. [default: 1.5 x what plain decoding can serve]")] = None,
    online_seconds: Annotated[float, typer.Option(help="Seconds of requests at each rate.")] = 20.0,
    output: Annotated[Path, typer.Option(help="Folder for the report and the configuration.")] = Path("advice"),
    allow_errors: AllowErrors = False,
) -> None:
    """Measure a running stack with your prompts, and decide in five steps whether to speculate, with how many drafts, and how to try it."""
    with exit_on_error(2):
        from specwire.advise.command import Stack, read_lines, run_advise
        from specwire.advise.options import AdviseOptions, Thresholds, parse_concurrencies
        from specwire.bench.accept import AcceptOptions, parse_weights

        options = AdviseOptions(
            accept=AcceptOptions(
                address=connection.address,
                prompts=choice.prompts,
                chat=choice.chat,
                categories=split_names(choice.categories),
                weights=parse_weights(choice.weights),
                num_prompts=choice.num_prompts,
                max_tokens=output_len,
                params=sampling.params(),
                max_concurrency=max_concurrency,
                timeout_s=sending.timeout,
                max_retries=sending.retries,
                ready_timeout_s=sending.ready_timeout,
                allow_errors=allow_errors,
            ),
            output=output,
            concurrencies=parse_concurrencies(concurrency),
            step_len=step_len,
            repeats=repeats,
            low_rate=low_rate,
            high_rate=high_rate,
            online_s=online_seconds,
            thresholds=Thresholds(**dataclasses.asdict(thresholds)),
        )
        connections = [connection, *(dataclasses.replace(connection, address=address) for address in candidate or ())]
        stacks = [Stack(each.address, lambda each=each: make_async_client(each)) for each in connections]  # type: ignore[misc]
        lines = read_lines(options)
    with exit_on_error(1):
        status = run_advise(options, lines, stacks)
    raise typer.Exit(status)
