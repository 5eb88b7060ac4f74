"""What the services add to the engine: plain decoding of dummy models through verifier, drafter (K = 0) and coordinator on loopback.

The engine alone runs in turns with them, on the same GPU, behind the same rounds. A step is (time of all tokens - time of 1 token) / steps, from the
client's first message to the last token of the slowest sequence; the best of the repeats, as the peer was measured. Prompts are the same in every
repeat and come from the verifier's prefix cache: they are no part of a step. Then one more batch whose first request is traced: where a step's
time goes.
"""

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.gpu import peer
from benchmarks.gpu.breakdown import TraceKey, break_down, read_traces
from benchmarks.gpu.engine_alone import Engine
from benchmarks.gpu.engine_models import LLAMA_8B, SMOLLM2_135M, TINY, save_shape
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.load import random_prompts, run_batch
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slice, Slices, make_parser
from benchmarks.gpu.stack import TCP, UNIX, Peers, Served, drafter_config, no_drafts, serve_coordinator, serve_peers, verifier_config
from specwire.engine.models.config import ModelConfig
from specwire.speculative_config import SpeculativeConfig

SLICES = SECONDS["services"]
"""The first one of a model also pays for starting it."""
_MODELS = {"llama8b": ("llama-8b", LLAMA_8B), "smollm": ("smollm2-135m", SMOLLM2_135M)}
_VARIANTS = {"unix": (UNIX, 2), "tcp": (TCP, 2), "w1": (UNIX, 1), "w4": (UNIX, 4)}
"""Transport, and rounds in flight (W)."""
MAX_ABOVE_MS, MAX_ABOVE_PERCENT = 0.35, 5.0
"""Aims: above the engine alone, at one sequence and at 256."""


async def measure_model(slices: Slices, model: str, names: list[str], sizes: Sizes, config: ModelConfig, device: str) -> None:
    """All slices of a model, behind one verifier and one engine."""
    label, _ = _MODELS[model]
    engine = Engine(config, sizes, device)
    gc.collect()
    gc.freeze()  # this process is the client, too
    print(f"{label}: engine alone: weights {engine.load_s:.1f} s, {len(engine.runner.graph_sizes)} graphs {engine.capture_s:.1f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        speculative = SpeculativeConfig(num_speculative_tokens=sizes.num_draft_tokens)
        verifier = verifier_config(folder, save_shape(config, folder / label), sizes, device, speculative)
        max_rounds = max(num_rounds for _, num_rounds in _VARIANTS.values())
        verifier = replace(verifier, enable_prefix_caching=True, num_kv_blocks=2 * verifier.num_kv_blocks, max_outstanding_rounds=max_rounds)
        prompts = random_prompts(config.vocab_size, sizes.max_num_seqs, sizes.num_prompt_tokens)
        drafter = drafter_config(folder, sizes, "cpu", speculative)
        async with serve_peers(folder, sizes, config.vocab_size, verifier, drafter) as peers:
            for slice_name in names:
                transport, num_rounds = _VARIANTS[slice_name.partition("-")[2]]
                with slices.open(slice_name, keep=lambda row: "period_ms" in row) as part:
                    part.note(model=label, transport=transport, max_outstanding_rounds=num_rounds)
                    await measure_variant(part, peers, engine, prompts, label, transport, num_rounds)


async def measure_variant(
    part: Slice, peers: Peers, engine: Engine, prompts: Sequence[list[int]], label: str, transport: str, num_rounds: int
) -> None:
    """Every number of sequences through one coordinator, then the traces."""
    sizes = peers.sizes
    traced: list[tuple[dict[str, Any], TraceKey, list[tuple[int, int]]]] = []
    async with serve_coordinator(peers, transport, no_drafts(sizes), max_outstanding_rounds=num_rounds) as served:
        for count in (count for count in sizes.concurrency if not part.has(c=count)):
            row = await compare(served, engine, prompts[:count], label)
            key = TraceKey.random()
            generated = await run_batch(served.channel, list(prompts[:count]), sizes.num_steps + 1, traceparent=key.traceparent)
            traced.append((row, key, generated.arrivals))
            part.add(row)
    spans = await read_traces(peers.trace_file, [key for _, key, _ in traced])
    for row, key, arrivals in traced:
        row |= break_down(spans[key.hex], arrivals)
    part.note(breakdown="traces of the first request of one more batch")


async def compare(served: Served, engine: Engine, prompts: Sequence[list[int]], label: str) -> dict[str, Any]:
    """Engine and services in turns."""
    sizes, count = served.peers.sizes, len(prompts)

    async def generate(num_tokens: int) -> float:
        return (await run_batch(served.channel, list(prompts), num_tokens)).seconds

    engine.prefill(count)
    engine.decode(count)
    await generate(sizes.num_steps + 1)
    alone_s, first_s, total_s = [], [], []
    for _ in range(sizes.num_repeats):
        engine.reopen(count)
        alone_s.append(engine.decode(count))
        first_s.append(await generate(1))
        total_s.append(await generate(sizes.num_steps + 1))
    status = await served.status()
    step_ms, engine_ms = ((seconds / sizes.num_steps) * 1e3 for seconds in (min(total_s) - min(first_s), min(alone_s)))
    tok_s, peer_tok_s = count * 1e3 / step_ms, peer.PLAIN_TOK_S[label].get(count)
    above_percent = 100 * (step_ms / engine_ms - 1)
    row: dict[str, Any] = {"c": count, "step_ms": step_ms, "engine_ms": engine_ms, "above_ms": step_ms - engine_ms, "above_percent": above_percent}
    if count in (1, 256):
        aim = f"<= {MAX_ABOVE_MS} ms" if count == 1 else f"<= {MAX_ABOVE_PERCENT:g}%"
        row |= {"aim": aim, "is_met": step_ms - engine_ms <= MAX_ABOVE_MS if count == 1 else above_percent <= MAX_ABOVE_PERCENT}
    row |= {"tok_s": tok_s, "peer_tok_s": peer_tok_s, "x_peer": tok_s / peer_tok_s if peer_tok_s else None, "first_token_s": min(first_s)}
    row |= {"engine_s_of_repeats": alone_s, "first_token_s_of_repeats": first_s, "total_s_of_repeats": total_s}
    return row | {"coordinator_step": asdict(status.lanes[0].times)}


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    slices, options = Slices.parse("services", parser, arguments)
    sizes = chosen_sizes(options)
    pending = slices.pending()
    for model, (_, config) in _MODELS.items():
        names = [name for name in pending if name.startswith(f"{model}-")]
        if names:
            uvloop.run(measure_model(slices, model, names, sizes, TINY if options.tiny else config, options.device))
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
