"""Greedy generation and verify steps with llama.cpp in a process of its own, with an interpreter that has llama-cpp-python and nothing of ours.

PYTHON benchmarks/llama_cpp_worker.py FILE.gguf NUM_THREADS

A JSON object a line in, one out, `{"ready": true}` first. {"prompt": token ids, "num_tokens": n} gives {"token_ids": n ids, "times": n times in s};
{"prompt": token ids, "verify": n, "repeats": r} gives {"ms": r times of a pass over n tokens behind the prompt, with the logits of all}.
"""

import json
import sys
import time
from typing import Any

import llama_cpp


def main() -> None:
    path, num_threads = sys.argv[1:]
    model = llama_cpp.Llama(path, n_ctx=2048, n_threads=int(num_threads), n_threads_batch=int(num_threads), logits_all=True, verbose=False)
    print(json.dumps({"ready": True, "version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(verify(model, request) if "verify" in request else generate(model, request)), flush=True)


def generate(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    model.reset()
    token_ids, times = [], []
    for token_id in model.generate(request["prompt"], temp=0.0, top_k=1):
        times.append(time.perf_counter())
        token_ids.append(int(token_id))
        if len(token_ids) == request["num_tokens"]:
            break
    return {"token_ids": token_ids, "times": times}


def verify(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    prompt, num_tokens = request["prompt"], request["verify"]
    model.reset()
    model.eval(prompt)
    ms = []
    for _ in range(request["repeats"] + 1):
        model.n_tokens = len(prompt)  # the next pass drops what is behind
        started = time.perf_counter()
        model.eval(prompt[:num_tokens])
        ms.append((time.perf_counter() - started) * 1e3)
    return {"ms": ms[1:]}


if __name__ == "__main__":
    main()
