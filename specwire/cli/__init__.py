"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from specwire.config import DEFAULT_MODEL, DEFAULT_PORT, VerifierConfig
from specwire.errors import SpecwireError

_DEFAULTS = VerifierConfig()

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Speculative decoding for large language models, split into gRPC services.",
)


def main() -> None:
    """Entry point: status 2 for wrong arguments, 1 for anything else that fails, with a message on stderr."""
    app(prog_name="specwire")


@contextlib.contextmanager
def exit_on_error(status: int) -> Iterator[None]:
    """Turns an error that the user can act on into its message on stderr and an exit status."""
    try:
        yield
    except SpecwireError as error:
        typer.echo(f"specwire: {error}", err=True)
        raise typer.Exit(status) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        from specwire.version import build_version

        typer.echo(f"specwire {build_version()}")
        raise typer.Exit


@app.callback()
def specwire(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Options of every command; --version acts in its callback."""


@app.command()
def up(
    model: Annotated[str, typer.Option(help="Target model: a Hugging Face folder, a GGUF file or a hub id.")] = DEFAULT_MODEL,
    load_format: Annotated[str, typer.Option(help="auto, or dummy for seeded random weights of the model's shape.")] = _DEFAULTS.load_format,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16), float32 or bfloat16.")] = _DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = _DEFAULTS.device,
    num_threads: Annotated[int, typer.Option(help="CPU threads of each model; 0 = all cores, shared among the verifiers.")] = 0,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence in tokens; 0 = the model's context.")] = _DEFAULTS.max_model_len,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences that a verifier runs at once.")] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = _DEFAULTS.max_num_batched_tokens,
    kv_cache_memory: Annotated[int, typer.Option(help="Bytes for the paged KV cache of each model.")] = _DEFAULTS.kv_cache_memory,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1 for clients; 0 = any free one.")] = DEFAULT_PORT,
    verifiers: Annotated[int, typer.Option(help="Number of verifiers, each with a copy of the target model.")] = 1,
    drafters: Annotated[int, typer.Option(help="Number of drafters.")] = 1,
    no_drafter: Annotated[bool, typer.Option("--no-drafter", help="Decode plainly.")] = False,
    speculative_config: Annotated[str, typer.Option(help="Speculation as a JSON object; the README has its keys.")] = "{}",
    demo: Annotated[bool, typer.Option("--demo", help="Stream the answer to a demo prompt, then keep serving.")] = False,
    startup_timeout: Annotated[float, typer.Option(help="Seconds that each service may take to become healthy.")] = 600.0,
) -> None:
    """Start drafter, verifier and coordinator on this machine and serve until Ctrl-C."""
    from specwire.cli.stack import StackOptions
    from specwire.cli.up import run_up
    from specwire.speculative_config import SpeculativeConfig

    with exit_on_error(2):
        options = StackOptions(
            model=model,
            load_format=load_format,
            dtype=dtype,
            device=device,
            num_threads=num_threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            port=port,
            num_verifiers=verifiers,
            num_drafters=0 if no_drafter else drafters,
            speculative_config=SpeculativeConfig.from_json(speculative_config),
        )
    with exit_on_error(1):
        run_up(options, with_demo=demo, startup_timeout_s=startup_timeout)


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
