"""Draft heads in a service of their own on the verifier's GPU.

`eagle3`: llama-8b and an EAGLE-3 head of its shape with made-up weights, K = 3, drafts accepted at given rates: fixed K, and a schedule from the
cost tables that both services measured. `smollm-METHOD`: the real small model and a trained head (--head), on real prompts (--prompts), with adaptive
verification. Both beside plain decoding at the same verifier, behind the same prompts, as `benchmarks.gpu.draft` measures. Then one more batch whose
first request is traced: where a step's time goes. What the drafter reads of features is per read, one a step.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu import peer
from benchmarks.gpu.breakdown import TraceKey, break_down, read_traces
from benchmarks.gpu.draft import measure_batch, read_cost, read_draft_costs
from benchmarks.gpu.engine_models import LLAMA_8B, TINY, save_shape
from benchmarks.gpu.feature_traffic import FeatureTraffic
from benchmarks.gpu.head_files import save_eagle3_head
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.load import random_prompts, run_batch
from benchmarks.gpu.schedule import Schedule, advised_schedule, measured_steps
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slice, Slices, make_parser
from benchmarks.gpu.stack import UNIX, Peers, drafter_config, serve_coordinator, serve_peers, verifier_config
from specwire.bench.workload import read_prompt_file
from specwire.cli.up import free_port
from specwire.engine.checkpoint import resolve_model
from specwire.engine.models.config import ModelConfig
from specwire.speculative_config import SpeculativeConfig
from specwire.tokenizer import Tokenizer
from specwire.train.data import encode_prompt

SLICES = SECONDS["draft_heads"]
NUM_DRAFTS = 3
RATES = peer.SYNTHETIC_RATES[:NUM_DRAFTS]
EAGLE3_AIMS = {1: 1.0, 8: 1.1, 32: 1.1, 128: 1.0, 256: 1.0}
"""Times the peer's tokens a second."""
SMOLLM_AIMS = {1: 1.1}
"""Times plain decoding; 0.98 at every other number of sequences."""
_MIN_X_PLAIN = 0.98
_HEAD_KV_BYTES, _TINY_KV_BYTES = 4 << 30, 16 << 20
_TINY_REAL_PROMPT = 120
"""Real prompts have no fewer tokens."""
_DRAFT_VOCAB, _TINY_DRAFT_VOCAB = 32_000, 128
_TRAINED = {"smollm-eagle3": ("eagle3", 5), "smollm-dspark": ("dspark", 7)}
"""Method and K of the slices with a trained head."""


async def measure_eagle3(part: Slice, sizes: Sizes, device: str, *, is_tiny: bool) -> None:
    """Made-up weights."""
    target = TINY if is_tiny else LLAMA_8B
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        head = save_eagle3_head(target, _TINY_DRAFT_VOCAB if is_tiny else _DRAFT_VOCAB, folder / "head", NUM_DRAFTS)
        speculative = SpeculativeConfig(
            method="eagle3", model=str(head), num_speculative_tokens=NUM_DRAFTS,
            rejection_sample_method="synthetic", synthetic_acceptance_rates=RATES, max_model_len=sizes.max_model_len,
        )  # fmt: skip
        verifier = verifier_config(folder, save_shape(target, folder / "target"), sizes, device, speculative)
        prompts = random_prompts(target.vocab_size, sizes.max_num_seqs, sizes.num_prompt_tokens)
        peers = _Peers(folder, sizes, target, verifier, drafter_config(folder, sizes, device, speculative), is_tiny)
        async with peers.serve() as (served, metrics):
            cost = await read_cost(served)
            context = sizes.num_prompt_tokens + sizes.num_steps // 2
            part.note(draft_costs=await read_draft_costs(served))
            every = (1, sizes.max_num_seqs)
            plain = replace(speculative, num_speculative_tokens_per_batch_size=((*every, 0),))

            async def compare(policy: str, schedule: Schedule, counts: Sequence[int]) -> None:
                configs = {"plain": plain, policy: replace(speculative, num_speculative_tokens_per_batch_size=schedule)}
                for count in (count for count in counts if not part.has(c=count, policy=policy)):
                    rows = await _measure(served, metrics, configs, prompts[:count], is_tiny=is_tiny)
                    tok_s, aim = rows[policy]["tok_s"], EAGLE3_AIMS.get(count, 1.0) * peer.EAGLE3_TOK_S.get(count, 0)
                    known = {"aim_tok_s": aim, "is_met": tok_s >= aim, "peer_tok_s": peer.EAGLE3_TOK_S.get(count)}
                    part.add({"c": count, "policy": policy, "tok_s": tok_s, **known, **_columns(rows)})

            await compare("fixed", ((*every, NUM_DRAFTS),), sizes.concurrency)
            schedule = advised_schedule(cost, RATES, measured_steps(_steps(part.rows), context), sizes.max_num_seqs, context)
            part.note(schedule=schedule)
            fixed = {count for first, last, k in schedule if k == NUM_DRAFTS for count in range(first, last + 1)}
            await compare("schedule", schedule, [count for count in sizes.concurrency if count not in fixed])


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of rows of fixed K, as `measured_steps` takes them."""
    fixed = [(row["c"], row["configurations"]) for row in rows if row["policy"] == "fixed"]
    return [{"c": count, "k": NUM_DRAFTS, **found["fixed"], "plain": found["plain"]} for count, found in fixed]


async def measure_smollm(part: Slice, sizes: Sizes, options: argparse.Namespace, method: str) -> None:
    """Real weights.

    Args:
        method: of the head; K is `sizes.num_draft_tokens`.
    """
    is_tiny, device = options.tiny, options.device
    model = resolve_model(options.model)
    tokenizer = Tokenizer.from_folder(model)
    target = ModelConfig.from_folder(model)
    if is_tiny:
        sizes = replace(sizes, num_prompt_tokens=_TINY_REAL_PROMPT)
    prompts = read_prompts(Path(options.prompts), tokenizer, sizes)
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        speculative = SpeculativeConfig(
            method=method, model=options.head, num_speculative_tokens=sizes.num_draft_tokens, max_model_len=sizes.max_model_len
        )
        real: dict[str, Any] = {"load_format": "auto", "skip_tokenizer": False}
        verifier = replace(verifier_config(folder, model, sizes, device, speculative), **real)
        drafter = replace(drafter_config(folder, sizes, device, speculative), target_model=str(model), **real)
        peers = _Peers(folder, sizes, target, verifier, drafter, is_tiny)
        async with peers.serve() as (served, metrics):
            part.note(draft_costs=await read_draft_costs(served))
            configs = {
                "plain": replace(speculative, num_speculative_tokens_per_batch_size=((1, sizes.max_num_seqs, 0),)),
                "adaptive": replace(speculative, enable_adaptive_verification=True),
                "fixed": replace(speculative, num_speculative_tokens_per_batch_size=((1, sizes.max_num_seqs, sizes.num_draft_tokens),)),
            }
            for count in (count for count in sizes.concurrency if not part.has(c=count)):
                rows = await _measure(served, metrics, configs, prompts[:count], is_tiny=is_tiny)
                plain, tok_s = rows["plain"]["tok_s"], rows["adaptive"]["tok_s"]
                aim = SMOLLM_AIMS.get(count, _MIN_X_PLAIN)
                known = {"peer_plain_tok_s": peer.PLAIN_TOK_S["smollm2-135m"].get(count), "x_plain_without_hops": without_hops(rows)}
                part.add(
                    {
                        "c": count,
                        "tok_s": tok_s,
                        "x_plain": tok_s / plain,
                        "aim_x_plain": aim,
                        "is_met": tok_s >= aim * plain,
                        **known,
                        **_columns(rows),
                    }
                )


def read_prompts(path: Path, tokenizer: Tokenizer, sizes: Sizes) -> list[list[int]]:
    """As many as there are sequences, spread over the file, none longer than the benchmark's prompts."""
    tokens = [encode_prompt(tokenizer, line.text) for line in read_prompt_file(path)]
    fitting = [prompt for prompt in tokens if len(prompt) <= sizes.num_prompt_tokens]
    if not fitting:
        raise SystemExit(f"no prompt of {path} has at most {sizes.num_prompt_tokens} tokens")
    stride = 7919  # prime: neighbours in the file are of one kind
    return [fitting[index * stride % len(fitting)] for index in range(sizes.max_num_seqs)]


def without_hops(rows: dict[str, dict[str, Any]]) -> float | None:
    """Adaptive relative to plain decoding by what drafter and verifier compute in a step alone: without hops, queues and the coordinator. None if the
    traced request was never drafted for."""
    if rows["adaptive"]["breakdown"]["draft_ms"] == 0:
        return None
    ms_per_token = {
        name: (rows[name]["breakdown"]["draft_ms"] + rows[name]["breakdown"]["forward_ms"]) / rows[name]["acceptance_length"]
        for name in ("plain", "adaptive")
    }
    return float(ms_per_token["plain"] / ms_per_token["adaptive"])


class _Peers:
    """Verifier and drafter of one slice."""

    def __init__(self, folder: Path, sizes: Sizes, target: ModelConfig, verifier: Any, drafter: Any, is_tiny: bool) -> None:
        self._folder, self._sizes, self._target = folder, sizes, target
        self._metrics = f"127.0.0.1:{free_port(0)}"
        self._verifier = replace(verifier, enable_prefix_caching=True, num_kv_blocks=2 * verifier.num_kv_blocks)
        self._drafter = replace(
            drafter, kv_cache_memory=_TINY_KV_BYTES if is_tiny else _HEAD_KV_BYTES, prefill_chunk=min(1024, sizes.max_num_batched_tokens),
            metrics_listen=self._metrics,
            trace_file=self._verifier.trace_file,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[tuple[Peers, str]]:
        """Both processes, and where the drafter's metrics are."""
        async with serve_peers(self._folder, self._sizes, self._target.vocab_size, self._verifier, self._drafter) as peers:
            yield peers, self._metrics


async def _measure(
    peers: Peers, metrics: str, configs: dict[str, SpeculativeConfig], prompts: list[list[int]], *, is_tiny: bool
) -> dict[str, dict[str, Any]]:
    """One number of sequences with every configuration, forth and back, the best of each; then the breakdown and the features of each."""
    fields: dict[str, Any] = {"min_draft_wait_ms": 10_000.0 if is_tiny else 5.0}
    rows: dict[str, dict[str, Any]] = {}
    order = list(configs)
    for name in [*order, *reversed(order)] if peers.sizes.num_repeats > 1 else order:
        row = await measure_batch(peers, configs[name], prompts, **fields)
        if name not in rows or row["tok_s"] > rows[name]["tok_s"]:
            rows[name] = row
    keys: dict[str, tuple[TraceKey, Sequence[tuple[int, int]]]] = {}
    for name, config in configs.items():
        async with serve_coordinator(peers, UNIX, config, **fields) as served:
            await run_batch(served.channel, prompts, peers.sizes.num_steps + 1)
            before, key = await asyncio.to_thread(FeatureTraffic.read, metrics), TraceKey.random()
            generated = await run_batch(served.channel, prompts, peers.sizes.num_steps + 1, traceparent=key.traceparent)
            rows[name]["features"] = (await asyncio.to_thread(FeatureTraffic.read, metrics)).since(before)
            keys[name] = key, generated.arrivals
    spans = await read_traces(peers.trace_file, [key for key, _ in keys.values()], with_drafts=True)
    for name, (key, arrivals) in keys.items():
        rows[name]["breakdown"] = break_down(spans[key.hex], arrivals)
    return rows


def _columns(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a table shows of each configuration, and all of it."""
    return {f"{name}_tok_s": row["tok_s"] for name, row in rows.items()} | {"configurations": rows}


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="smollm: the target")
    parser.add_argument("--head", default="", help="smollm: folder of a head that was trained for it, by the slice's method")
    parser.add_argument("--prompts", default="", help="smollm: JSONL file")
    slices, options = Slices.parse("draft_heads", parser, arguments)
    sizes, pending = chosen_sizes(options), slices.pending()
    trained = [name for name in pending if name in _TRAINED]
    if len(trained) > 1:
        raise SystemExit(f"--head is of one method; --only names the slice of it: {' or '.join(trained)}")
    if trained and not (options.head and options.prompts):
        raise SystemExit(f"the slice {trained[0]} needs --head and --prompts")
    for name in pending:
        with slices.open(name, keep=lambda row: True) as part:
            if name in _TRAINED:
                method, num_drafts = _TRAINED[name]
                measured = measure_smollm(part, replace(sizes, num_draft_tokens=options.num_draft_tokens or num_drafts), options, method)
            else:
                measured = measure_eagle3(part, replace(sizes, num_draft_tokens=NUM_DRAFTS), options.device, is_tiny=options.tiny)
            uvloop.run(measured)


if __name__ == "__main__":
    main()
