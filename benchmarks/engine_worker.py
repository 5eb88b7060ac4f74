"""Verify steps of our engine alone in a process of its own; asked and answering as `llama_cpp_worker` does.

python -m benchmarks.engine_worker MODEL_FOLDER WEIGHTS NUM_THREADS

{"read": r} gives {"gb_s": r rates at which as many threads read memory that no cache holds}.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specwire.engine.batch import Segment
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.loader import open_model
from specwire.engine.runner import ModelRunner, set_num_threads

_READ_BYTES = 2 << 30


def main() -> None:
    folder, weights, num_threads = sys.argv[1:]
    set_num_threads(int(num_threads))
    model = open_model(Path(folder), load_format="auto", dtype="auto", device="cpu", weights=weights)
    runner = ModelRunner(model, KVCache(model.config, 2048 // BLOCK_SIZE, model.dtype))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(read_memory(request["read"]) if "read" in request else verify(runner, request)), flush=True)


def verify(runner: ModelRunner, request: dict[str, Any]) -> dict[str, Any]:
    prompt, num_tokens = request["prompt"], request["verify"]
    table = range(runner.kv_cache.num_blocks)
    runner.forward(runner.batch([Segment(prompt, 0, table)]))
    ms = []
    for _ in range(request["repeats"] + 1):
        started = time.perf_counter()
        hidden = runner.forward(runner.batch([Segment(prompt[:num_tokens], len(prompt), table)]))
        runner.logits(hidden, range(num_tokens))
        ms.append((time.perf_counter() - started) * 1e3)
    return {"ms": ms[1:]}


def read_memory(repeats: int) -> dict[str, Any]:
    memory = torch.ones(_READ_BYTES // 4)
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        memory.sum()
        rates.append(_READ_BYTES / (time.perf_counter() - started) / 1e9)
    return {"gb_s": rates}


if __name__ == "__main__":
    main()
