"""The processes that `benchmarks.llama_cpp` asks, and what it makes of their answers; llama.cpp itself is a stand-in."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.engine_worker import verify
from benchmarks.llama_cpp import compare_verify
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.loader import dummy_model
from specwire.engine.runner import ModelRunner
from tests.verifier.harness import tiny_config

WORKER = Path(__file__).parents[2] / "benchmarks" / "llama_cpp_worker.py"
STAND_IN = '''
__version__ = "0.0"
class Llama:
    """Counts on from the last token of the prompt; a pass that does not continue the prompt fails."""
    def __init__(self, path, *, n_ctx, n_threads, n_threads_batch, logits_all, verbose):
        assert (path, n_threads, n_threads_batch, logits_all) == ("model.gguf", 2, 2, True)
    def reset(self):
        self.n_tokens = 0
    def generate(self, tokens, temp, top_k):
        assert (temp, top_k) == (0.0, 1)
        token = tokens[-1]
        while True:
            token += 1
            yield token
    def eval(self, tokens):
        assert self.n_tokens == (0 if len(tokens) == 5 else 5), self.n_tokens
        self.n_tokens += len(tokens)
'''


def test_the_worker_generates_and_verifies(tmp_path):
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    requests = [{"prompt": [1, 2, 7], "num_tokens": 4}, {"prompt": [1, 2, 3, 4, 5], "verify": 3, "repeats": 6}]
    done = subprocess.run(
        [sys.executable, "-P", str(WORKER), "model.gguf", "2"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ready, generated, verified = map(json.loads, done.stdout.splitlines())
    assert ready["ready"]
    assert generated["token_ids"] == [8, 9, 10, 11]
    assert generated["times"] == sorted(generated["times"])
    assert len(verified["ms"]) == 6


def test_our_engine_answers_alike():
    model = dummy_model(tiny_config(), torch.float32)
    answer = verify(ModelRunner(model, KVCache(model.config, 4, model.dtype)), {"prompt": [1, 2, 3, 4, 5], "verify": 3, "repeats": 6})
    assert len(answer["ms"]) == 6
    assert min(answer["ms"]) > 0


def test_a_verify_step_is_compared_by_the_rounds_medians():
    class Stub:
        def __init__(self, name: str, rounds: list[list[float]]) -> None:
            self.name, self._rounds = name, iter(rounds)

        async def ask(self, request: dict) -> dict:
            assert request["verify"] == 6
            return {"ms": next(self._rounds)}

    ours, theirs = Stub("engine", [[1.0, 2.0, 9.0], [3.0], [4.0]]), Stub("llama.cpp", [[4.0], [4.0, 4.0], [5.0]])
    figures = asyncio.run(compare_verify(ours, theirs, [1], 3))
    assert (figures["ms"], figures["beside_ms"], figures["ratio"]) == (3.0, 4.0, 0.75)
    assert figures["ms_of_rounds"] == [2.0, 3.0, 4.0]
