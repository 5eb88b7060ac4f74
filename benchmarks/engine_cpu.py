"""Times forward passes of the engine on a CPU beside transformers', interleaved in one process; prints one JSON object.

python -m benchmarks.engine_cpu --threads 2 --context 256
"""

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from specwire.engine.batch import Segment
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import DTYPES, load_model, open_model, parse_dtype
from specwire.engine.runner import ModelRunner, set_num_threads

PROMPT_TOKENS, GENERATED_TOKENS = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "int4"], help="dtypes, or formats of the weights (ours alone)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--query-lens", type=int, nargs="+", default=[1, 2, 6, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    set_num_threads(args.threads)
    folder = resolve_model(args.model)
    report = {
        "model": args.model,
        "threads": args.threads,
        "context": args.context,
        "rounds": args.rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "unit": "ms, median of the rounds",
        "results": [],
    }
    for dtype in args.dtypes:
        report["results"].extend(_measure_dtype(folder, dtype, args))
    print(json.dumps(report, indent=2))


@torch.inference_mode()
def _measure_dtype(folder: Path, dtype_name: str, args: argparse.Namespace) -> list[dict]:
    theirs = None
    if dtype_name in DTYPES:
        ours = load_model(folder, parse_dtype(dtype_name))
        if not args.no_transformers:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype).eval()
    else:
        ours = open_model(folder, load_format="auto", dtype="auto", device="cpu", weights=dtype_name)
    results = []
    for batch_size in args.batch_sizes:
        results.extend({"dtype": dtype_name, "batch": batch_size} | result for result in _measure_steps(ours, theirs, batch_size, args))
    return [*results, {"dtype": dtype_name, "batch": 1} | _measure_generate(ours, theirs, args)]


def _measure_steps(ours: Decoder, theirs: torch.nn.Module | None, batch_size: int, args: argparse.Namespace) -> list[dict]:
    """Forward passes of each query length behind `context` tokens, with logits of all rows."""
    prompt = _random_tokens(ours, batch_size, args.context)
    runner, tables = _runner(ours, batch_size, args.context + max(args.query_lens))
    runner.forward(runner.batch([Segment(row, 0, table) for row, table in zip(prompt.tolist(), tables, strict=True)]))
    cache = transformers.DynamicCache()
    if theirs is not None:
        theirs(prompt, cache=cache, logits_to_keep=1)
    results = []
    for query_len in args.query_lens:
        tokens = prompt[:, :query_len].contiguous()
        runs = {"specwire": functools.partial(_step, runner, tokens, args.context, tables)}
        if theirs is not None:
            runs["transformers"] = functools.partial(_their_step, theirs, tokens, cache, args.context)
        results.append({"query_len": query_len} | _interleaved(runs, args.rounds))
    return results


def _measure_generate(ours: Decoder, theirs: torch.nn.Module | None, args: argparse.Namespace) -> dict:
    """Greedy generation behind a short prompt, per token, prefill included."""
    prompt = _random_tokens(ours, 1, PROMPT_TOKENS)
    runner, tables = _runner(ours, 1, PROMPT_TOKENS + GENERATED_TOKENS)
    runs = {"specwire": functools.partial(_generate, runner, prompt[0].tolist(), tables[0])}
    if theirs is not None:
        length = {"max_new_tokens": GENERATED_TOKENS, "min_new_tokens": GENERATED_TOKENS}
        runs["transformers"] = functools.partial(theirs.generate, prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)
    times = _interleaved(runs, max(3, args.rounds // 2))
    per_token = {name: round(value / GENERATED_TOKENS, 2) for name, value in times.items()}
    return {"generate": f"{PROMPT_TOKENS} + {GENERATED_TOKENS} tokens, ms per generated token"} | per_token


def _random_tokens(model: Decoder, batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0))


def _runner(model: Decoder, batch_size: int, max_len: int) -> tuple[ModelRunner, list[list[int]]]:
    blocks = -(-max_len // BLOCK_SIZE)
    runner = ModelRunner(model, KVCache(model.config, blocks * batch_size, model.dtype))
    return runner, [list(range(row * blocks, (row + 1) * blocks)) for row in range(batch_size)]


def _step(runner: ModelRunner, tokens: torch.Tensor, context: int, tables: list[list[int]]) -> torch.Tensor:
    """All rows' logits, as a verify step needs them."""
    batch = runner.batch([Segment(row, context, table) for row, table in zip(tokens.tolist(), tables, strict=True)])
    return runner.logits(runner.forward(batch), range(batch.num_tokens))


def _their_step(model: torch.nn.Module, tokens: torch.Tensor, cache: transformers.DynamicCache, context: int) -> torch.Tensor:
    logits = model(tokens, cache=cache).logits
    cache.crop(context - cache.get_seq_length())
    return logits


def _generate(runner: ModelRunner, prompt: list[int], table: list[int]) -> list[int]:
    """Greedy continuation, one token a pass."""
    generated: list[int] = []
    position, tokens = 0, prompt
    while len(generated) < GENERATED_TOKENS:
        hidden = runner.forward(runner.batch([Segment(tokens, position, table)]))
        position += len(tokens)
        tokens = [int(runner.logits(hidden, [len(tokens) - 1])[0].argmax())]
        generated += tokens
    return generated


def _interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


if __name__ == "__main__":
    main()
