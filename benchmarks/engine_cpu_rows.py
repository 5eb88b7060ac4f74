"""What a pass of the engine on a CPU costs by its number of rows: plain steps, verify steps of many sequences, a prompt.

python -m benchmarks.engine_cpu_rows --threads 1

Milliseconds of all threads' CPU time, head included, of formats of the weights in turns: the least of the repeats, since what else runs on the
machine only ever adds time. `torch` is bfloat16 through torch's own products.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.engine.batch import Segment
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import load_model
from specwire.engine.runner import ModelRunner, set_num_threads

STEPS = ((1, 1), (1, 2), (1, 4), (1, 6), (1, 8), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (96, 1), (16, 2), (16, 4), (16, 6))
"""Sequences, and rows of each."""
PROMPT = 450
_MANY_ROWS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--weights", nargs="+", default=["torch", "bf16"], help="formats of the weights, or torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20, help="of steps; a quarter of them where a step has more than 16 rows")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for engine_cpu_rows_THREADS.json")
    args = parser.parse_args()
    set_num_threads(args.threads)
    bystanders, folder = Bystanders(), resolve_model(args.model)
    models = {name: load_model(folder, torch.bfloat16, weights="" if name == "torch" else name) for name in args.weights}
    rows = []
    for sequences, query_len in STEPS:
        repeats = args.repeats if sequences * query_len <= _MANY_ROWS else max(3, args.repeats // 4)
        runs = {name: prepare_step(model, sequences, query_len, args.context) for name, model in models.items()}
        rows.append({"sequences": sequences, "rows_of_each": query_len, "cpu_ms": least_cpu_ms(runs, repeats)})
        print(rows[-1], flush=True)
    rows.append({"prompt": PROMPT, "cpu_ms": least_cpu_ms({name: prepare_prompt(model) for name, model in models.items()}, 3)})
    names = [f"{r['sequences']} x {r['rows_of_each']}" if "sequences" in r else f"prompt of {PROMPT}" for r in rows]
    print_table(["step", *models], [[name, *(f"{ms:.1f}" for ms in r["cpu_ms"].values())] for name, r in zip(names, rows, strict=True)])
    figures: dict[str, Any] = {"unit": "ms of CPU time, least of the repeats", "model": args.model, "threads": args.threads, "context": args.context}
    print(f"\nwritten to {write_report(f'engine_cpu_rows_{args.threads}', figures | {'results': rows}, args.output, bystanders)}")


def prepare_step(model: Decoder, sequences: int, query_len: int, context: int) -> Callable[[], None]:
    """Query_len tokens of each sequence behind its context, whose keys and values are random, with logits of all of them."""
    num_blocks = -(-(context + query_len) // BLOCK_SIZE)
    runner = ModelRunner(model, KVCache(model.config, num_blocks * sequences, model.dtype))
    for layer in runner.kv_cache.layers:
        layer.normal_()
    tokens = torch.randint(0, model.config.vocab_size, (sequences, query_len), generator=torch.Generator().manual_seed(0)).tolist()
    segments = [Segment(row, context, range(num_blocks * index, num_blocks * (index + 1))) for index, row in enumerate(tokens)]
    return partial(run, runner, segments, range(sequences * query_len))


def prepare_prompt(model: Decoder) -> Callable[[], None]:
    """A prompt, with logits of its last token."""
    num_blocks = -(-PROMPT // BLOCK_SIZE)
    tokens = torch.randint(0, model.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    runner = ModelRunner(model, KVCache(model.config, num_blocks, model.dtype))
    return partial(run, runner, [Segment(tokens, 0, range(num_blocks))], [PROMPT - 1])


@torch.inference_mode()
def run(runner: ModelRunner, segments: list[Segment], rows: list[int] | range) -> None:
    runner.logits(runner.forward(runner.batch(segments)), rows)


def least_cpu_ms(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    least = dict.fromkeys(runs, float("inf"))
    for step in runs.values():
        step()
    for _ in range(repeats):
        for name, step in runs.items():
            started = time.process_time()
            step()
            least[name] = min(least[name], (time.process_time() - started) * 1e3)
    return {name: round(ms, 2) for name, ms in least.items()}


if __name__ == "__main__":
    main()
