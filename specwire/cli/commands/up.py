"""`specwire up`."""

from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.config import DEFAULT_MODEL, DEFAULT_PORT, VerifierConfig

_DEFAULTS = VerifierConfig()


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
