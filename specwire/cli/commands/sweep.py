"""`specwire sweep`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from specwire.cli.app import app, exit_on_error
from specwire.cli.commands.measuring import AllowErrors, Chat, OutputLen, ReadyTimeout, Sampling, Timeout, split_names
from specwire.cli.connection import ApiKey, ConnectionOptions, TlsCa, TlsCert, TlsKey, make_async_client
from specwire.cli.option_groups import grouped


def _stack_option(help_text: str) -> Any:
    return typer.Option(help=f"Own stack: {help_text}", show_default=False)


@app.command(short_help="Measure throughput with fixed K, dynamic K and no drafts.")
@grouped
def sweep(
    sampling: Sampling,
    running: Annotated[str, typer.Option("--address", help="A running coordinator, instead of an own stack.", show_default=False)] = "",
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    config: Annotated[str | None, _stack_option("configuration file, as of `specwire up`.")] = None,
    model: Annotated[str | None, _stack_option("target model.")] = None,
    load_format: Annotated[str | None, _stack_option("auto or dummy.")] = None,
    skip_tokenizer: Annotated[bool, typer.Option("--skip-tokenizer", help="Own stack: serve token ids only.")] = False,
    dtype: Annotated[str | None, _stack_option("auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, _stack_option("cpu or cuda.")] = None,
    num_threads: Annotated[int | None, _stack_option("CPU threads of each model.")] = None,
    kv_cache_memory: Annotated[int | None, _stack_option("bytes for the KV cache of each model.")] = None,
    speculative_config: Annotated[str | None, _stack_option("speculation as a JSON object; its K is the ceiling.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Own stack: any key of the file: SECTION.KEY=VALUE.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, with commas between them.")] = "1,4,16",
    policies: Annotated[str, typer.Option(help="Of none, fixed, dynamic, adaptive. [default: all that the stack can have]", show_default=False)] = "",
    fixed: Annotated[str, typer.Option(help="K of the fixed ones, with commas between them. [default: the configured K]", show_default=False)] = "",
    prompts_per_user: Annotated[int, typer.Option(help="Requests of a run, as a multiple of its concurrency.")] = 4,
    repeats: Annotated[int, typer.Option(help="How often everything is measured; medians are shown.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="JSONL file with `prompt` or `turns`. [default: made-up token ids]")] = None,
    chat: Chat = False,
    input_len: Annotated[int, typer.Option(help="Tokens of a made-up prompt.")] = 128,
    output_len: OutputLen = 128,
    vocab_size: Annotated[int, typer.Option(help="Ids of made-up prompts end here; 0 = the served tokenizer's.")] = 0,
    timeout: Timeout = None,
    ready_timeout: ReadyTimeout = 10.0,
    output: Annotated[Path, typer.Option(help="Folder for sweep.json and sweep.png.")] = Path("sweep"),
    allow_errors: AllowErrors = False,
) -> None:
    """Measure throughput and a user's speed at several concurrencies, with fixed K, dynamic K, adaptive verification and no drafts."""
    models = {
        "load_format": load_format, "skip_tokenizer": skip_tokenizer or None, "dtype": dtype, "device": device, "num_threads": num_threads,
        "kv_cache_memory": kv_cache_memory,
    }  # fmt: skip
    # Services start while gRPC is in use: it would tell of each that it does nothing about the fork.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    with exit_on_error(2):
        from specwire.bench.serve_options import ServeOptions
        from specwire.bench.sweep.command import read_lines, run_sweep
        from specwire.bench.sweep.options import SweepOptions, parse_numbers
        from specwire.bench.sweep.stacks import OwnStack, RunningStack, SweptStack
        from specwire.bench.workload import Lengths
        from specwire.cli.sources import flags_source, read_sources
        from specwire.errors import InvalidArgumentError
        from specwire.extras import check_engine
        from specwire.stack.checks import check_models
        from specwire.stack.resolve import resolve_stack

        load = ServeOptions(
            address=running,
            prompts=prompts,
            chat=chat,
            lengths=Lengths(input_len, output_len),
            seed=sampling.seed,
            params=sampling.params(),
            vocab_size=vocab_size,
            timeout_s=timeout,
            ready_timeout_s=ready_timeout,
            allow_errors=allow_errors,
        )
        options = SweepOptions(
            load,
            output,
            parse_numbers("--concurrency", concurrency),
            split_names(policies),
            parse_numbers("--fixed", fixed),
            prompts_per_user,
            repeats,
        )
        stack: SweptStack
        if running:
            own: dict[str, object] = {"--config": config, "--model": model, "--speculative-config": speculative_config, "--set": set_}
            own |= {f"--{name.replace('_', '-')}": value for name, value in models.items()}
            if given := [flag for flag, value in own.items() if value is not None]:
                raise InvalidArgumentError(f"{given[0]} is of an own stack, but --address names a running one; leave one of them out")
            connection = ConnectionOptions(running, api_key, tls_ca, tls_cert, tls_key)
            stack = RunningStack(running, lambda: make_async_client(connection), ready_timeout)
        else:
            flags = flags_source({"verifier": {"model": model, **models}, "drafter": models}, speculative_config)
            asked = resolve_stack([*read_sources(config, set_ or []), flags])
            check_engine()
            check_models(asked)
            stack = OwnStack(asked)
        lines = read_lines(options)
    with exit_on_error(1):
        status = run_sweep(options, lines, stack)
    raise typer.Exit(status)
