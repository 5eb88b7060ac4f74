"""A run of `specwire bench serve` as JSON, and its settings as rows of a table."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.bench.metrics import ServeMetrics, to_figures
from specwire.bench.report import request_figures
from specwire.bench.runner import LoadRun
from specwire.bench.serve_options import ServeOptions, plan_arrivals
from specwire.bench.server_counts import Counts
from specwire.messages import SpecStats


@dataclass(frozen=True, slots=True)
class ServeResult:
    """What a run left.

    Attributes:
        backend, address: how and where the server was called.
        server: what the coordinator counted meanwhile; None if it can't say.
        speculation: what a server says of it that does not tell it in its answers.
        cpu_share: cores that the load generator itself was busy on.
        texts: of the answers, where they are wanted: None of one that came as token ids that nobody can decode.
    """

    backend: str
    address: str
    model_id: str
    run: LoadRun
    server: Counts | None
    speculation: SpecStats | None
    cpu_share: float
    texts: Sequence[str | None] = ()


def make_report(options: ServeOptions, environment: dict[str, Any], result: ServeResult, metrics: ServeMetrics) -> dict[str, Any]:
    """The JSON report: where and how it was measured, then figures by the names of `vllm bench serve`."""
    run, server = result.run, result.server
    report = {
        "benchmark": "serve",
        **environment,
        "backend": result.backend,
        "endpoint_type": result.backend,
        "label": None,
        "model_id": result.model_id,
        "tokenizer_id": result.model_id,
        "num_prompts": len(run.records),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "latencies_count_from": "sending" if plan_arrivals(options, 0) is None else "scheduled arrival",
        "client_cpu_share": result.cpu_share,
        "settings": settings(options),
        **to_figures(metrics),
        "counted_by_client": dataclasses.asdict(Counts.of_records(run.records)),
        "counted_by_coordinator": None if server is None else dataclasses.asdict(server),
    }
    if options.save_detailed:
        report["requests"] = [request_figures(record, run.start_s) for record in run.records]
        report |= _by_request(result)
    return report


def _by_request(result: ServeResult) -> dict[str, Any]:
    """The lists of `vllm bench serve --save-detailed`: what failed has zeros and its error."""
    records = result.run.records
    texts = ["".join(record.texts) if record.texts else text or "" for record, text in zip(records, result.texts, strict=True)]
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [record.ttft_s if record.chunk_times_s else 0.0 for record in records],
        "itls": [record.chunk_gaps_s for record in records],
        "start_times": [record.start_s for record in records],
        "generated_texts": texts,
        "errors": [record.error_text or record.error for record in records],
    }


def settings(options: Any) -> dict[str, Any]:
    """All options as JSON has them."""
    values = dataclasses.asdict(options)
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def setting_rows(options: ServeOptions, result: ServeResult) -> list[tuple[str, str]]:
    lengths = options.lengths
    if options.prompts is not None:
        workload = f"{options.prompts.name}{', chat' if options.chat else ''}, at most {lengths.output_len} tokens of output"
    else:
        spread = "" if lengths.distribution == "fixed" else f", {lengths.distribution}, spread {lengths.spread:g}"
        prefix = f"{lengths.prefix_len} shared + " if lengths.prefix_len else ""
        workload = f"synthetic: {prefix}{lengths.input_len} tokens in, {lengths.output_len} out{spread}"
    if plan_arrivals(options, 0) is None:
        arrivals = f"closed loop of {options.max_concurrency} (latencies count from sending)"
    else:
        rate = "all at once" if math.isinf(options.request_rate) else f"{options.request_rate:g} requests/s, burstiness {options.burstiness:g}"
        limit = f", at most {options.max_concurrency} at once" if options.max_concurrency else ""
        arrivals = f"{rate}{limit} (latencies count from the scheduled arrival)"
    return [
        ("server", ", ".join(filter(None, (result.address, result.model_id, result.backend)))),
        ("workload", workload),
        ("arrivals", arrivals),
        ("requests sent", f"{len(result.run.records)}, after {options.num_warmups} to warm up"),
        ("load generator", f"{100 * result.cpu_share:.0f}% of a core"),
    ]
