"""`specwire up`."""

from typing import Annotated, Any

import typer

from specwire.cli.app import app, exit_on_error
from specwire.config import CoordinatorConfig, UpConfig, VerifierConfig
from specwire.errors import InvalidArgumentError

_UP, _VERIFIER, _COORDINATOR = UpConfig(), VerifierConfig(), CoordinatorConfig()


def _option(help_text: str, default: object = "", *names: str) -> Any:
    """An option that is None unless it was given: what was not comes from the file."""
    return typer.Option(*names, help=help_text, show_default=str(default) if default != "" else False)


def _no_host(host: str) -> str:
    """What to do instead of --host."""
    listen = f"--set http.listen={host}:{_UP.http_port} and, for gRPC, --set coordinator.listen={host}:{_UP.port}"
    return f"there is no --host: services listen on 127.0.0.1 unless told otherwise; give {listen}"


@app.command()
def up(
    model_: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)] = None,
    config: Annotated[str | None, _option("Configuration file; empty = none.", "SPECWIRE_CONFIG's, else ./specwire.yaml if there is one")] = None,
    model: Annotated[str | None, _option("Target model: a Hugging Face folder, a GGUF file or a hub id.", _VERIFIER.model)] = None,
    load_format: Annotated[str | None, _option("auto, or dummy for seeded random weights of the model's shape.", _VERIFIER.load_format)] = None,
    skip_tokenizer: Annotated[bool, typer.Option("--skip-tokenizer", help="Serve token ids only, without a tokenizer.")] = False,
    dtype: Annotated[str | None, _option("auto (bfloat16), float32 or bfloat16.", _VERIFIER.dtype)] = None,
    weights: Annotated[str | None, _option("How a CPU keeps the weights: auto, int4, int8, bf16 or fp32.", _VERIFIER.weights)] = None,
    device: Annotated[str | None, _option("cpu or cuda.", _VERIFIER.device)] = None,
    num_threads: Annotated[int | None, _option("CPU threads of each model; 0 = all cores, shared among the verifiers.", 0)] = None,
    max_model_len: Annotated[int | None, _option("Longest sequence in tokens; 0 = the model's context.", _VERIFIER.max_model_len)] = None,
    max_num_seqs: Annotated[int | None, _option("Most sequences that a verifier runs at once.", _VERIFIER.max_num_seqs)] = None,
    max_num_batched_tokens: Annotated[int | None, _option("Most tokens of a step.", _VERIFIER.max_num_batched_tokens)] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _option("Share of its GPU's memory that each verifier may use.", f"{_VERIFIER.gpu_memory_utilization}, divided where several share one"),
    ] = None,
    kv_cache_memory: Annotated[int | None, _option("Bytes for the paged KV cache of each model; 0 = what a GPU has left.", "1 GiB on a CPU")] = None,
    port: Annotated[int | None, _option("Port on 127.0.0.1 for clients; 0 = any free one.", _UP.port)] = None,
    http_port: Annotated[int | None, _option("Port on 127.0.0.1 of the OpenAI-compatible HTTP API; 0 = any free one.", _UP.http_port)] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Serve gRPC only.")] = False,
    verifiers: Annotated[int | None, _option("Number of verifiers, each with a copy of the target model.", _UP.verifiers)] = None,
    drafters: Annotated[int | None, _option("Number of drafters, where the file does not list them.", _UP.drafters)] = None,
    no_drafter: Annotated[bool, typer.Option("--no-drafter", help="Decode plainly.")] = False,
    speculative_config: Annotated[str | None, _option("Speculation as a JSON object; docs/configuration.md has its keys.")] = None,
    trace_file: Annotated[str | None, _option("File to which all services append their spans.")] = None,
    trace_endpoint: Annotated[str | None, _option("OTLP collector (gRPC) for the spans of all services.")] = None,
    trace_sample_ratio: Annotated[float | None, _option("Share of the requests that are traced.", _COORDINATOR.trace_sample_ratio)] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Prometheus metrics on 127.0.0.1: this port and those after it, one each service.", show_default=False, min=0, max=65535),
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(hidden=True)] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(hidden=True)] = None,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", hidden=True)] = False,
    host: Annotated[str | None, typer.Option(hidden=True)] = None,
    set_: Annotated[list[str] | None, _option("Any key of the file: SECTION.KEY=VALUE; may be given several times.", "", "--set")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Stream the answer to a demo prompt, then keep serving.")] = False,
    startup_timeout_s: Annotated[
        float | None,
        _option("Seconds that each service may take to become healthy.", _UP.startup_timeout_s, "--startup-timeout-s", "--startup-timeout"),
    ] = None,
) -> None:
    """Start all services on this machine and serve until Ctrl-C."""
    from specwire.cli.sources import flags_source, read_sources
    from specwire.cli.up import run_up
    from specwire.stack.resolve import resolve_stack

    models: dict[str, Any] = {
        "load_format": load_format,
        "skip_tokenizer": skip_tokenizer or None,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "num_threads": num_threads,
        "kv_cache_memory": kv_cache_memory,
    }
    verifier: dict[str, Any] = {
        "model": model if model_ is None else model_,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "gpu_memory_utilization": gpu_memory_utilization,
        # Not built: known here so that whoever asks for them is told what to do instead.
        "tensor_parallel_size": tensor_parallel_size,
        "kv_cache_dtype": kv_cache_dtype,
        "enable_lora": enable_lora or None,
    }
    services = {
        "port": port,
        "http_port": http_port,
        "http": False if no_http else None,
        "verifiers": verifiers,
        "drafters": 0 if no_drafter else drafters,
        "startup_timeout_s": startup_timeout_s,
    }
    metrics_listen = None if metrics_port is None else f"127.0.0.1:{metrics_port}"
    observed: dict[str, Any] = {"trace_file": trace_file, "trace_endpoint": trace_endpoint, "metrics_listen": metrics_listen}
    coordinator = observed | {"trace_sample_ratio": trace_sample_ratio}
    with exit_on_error(2):
        if model_ is not None and model not in (None, model_):
            raise InvalidArgumentError(f"the model is {model_}, but --model is {model}; name one")
        if host is not None:
            raise InvalidArgumentError(_no_host(host))
        if no_http and http_port is not None:
            raise InvalidArgumentError(f"--no-http and --http-port {http_port} exclude each other; leave one out")
        if no_drafter and drafters:
            raise InvalidArgumentError(f"--no-drafter and --drafters {drafters} exclude each other; leave one out")
        front = {"coordinator": coordinator, "http": coordinator}
        sections = {"verifier": verifier | models | observed, "drafter": models | observed, **front, "up": services}
        flags = flags_source(sections, speculative_config)
        options = resolve_stack([*read_sources(config, set_ or []), flags])
        if demo and options.verifier.skip_tokenizer:
            raise InvalidArgumentError("--demo sends text, and with --skip-tokenizer no tokenizer is served; leave one out")
    with exit_on_error(1):
        run_up(options, with_demo=demo)
