"""A real coordinator over a verifier on the round runner, whose rounds take their time: random requests are what the reference gives."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.runner import ModelRunner
from tests.engine.tiny_models import save_tiny_model
from tests.verifier.late import SlowExecutor
from verifier_svc import loading
from verifier_svc.round_executor import RoundExecutor

from .noisy_model import save_noisy
from .reference import OneTokenLoop
from .test_random_requests import check_request, random_requests
from .tiny import drafter_config, tiny_stack, verifier_config

_MAX_MODEL_LEN = 96
_K = 4
# No drafts for three to five sequences: they run ahead. Few and many are drafted for.
_SPECULATION: dict[str, Any] = {"num_speculative_tokens": _K, "num_speculative_tokens_per_batch_size": [[1, 2, _K], [3, 5, 0], [6, 64, 2]]}


@pytest.mark.parametrize("num_blocks", [14, 64])
async def test_random_requests_are_the_references(socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    save_tiny_model(tmp_path / "target", eos_token_id=[257, 5, 9])
    save_noisy(tmp_path / "target", tmp_path / "draft", 0.03)
    config = verifier_config(
        tmp_path / "target", num_speculative_tokens=_K, max_model_len=_MAX_MODEL_LEN, num_kv_blocks=num_blocks, max_num_seqs=8,
        max_num_batched_tokens=40,
    )  # fmt: skip
    limits = RoundLimits(config.max_num_seqs, _K, config.max_num_batched_tokens, _MAX_MODEL_LEN)
    executors = []

    def make_executor(runner: ModelRunner) -> SlowExecutor:
        rounds = RoundRunner(runner.model, runner.kv_cache, limits, num_in_flight=config.max_outstanding_rounds)
        executors.append(SlowExecutor(RoundExecutor(rounds, runner.kv_cache, limits.max_num_seqs), 0.002))
        return executors[0]

    monkeypatch.setattr(loading, "ModelExecutor", make_executor)
    requests = random_requests(random.Random(num_blocks))[:24]
    async with tiny_stack(socket_dir, config, drafter_config(tmp_path / "draft", num_speculative_tokens=_K), speculation=_SPECULATION) as stack:
        results = await asyncio.gather(*(stack.client.generate(prompt, params) for prompt, params in requests))
        counters = stack.coordinator.engine.counters
        assert counters.num_accepted_tokens > 0
        assert counters.num_bad_rows == 0
        assert stack.verifier.num_waits == 0, "a coordinator sends no row that depends on what is not read"
        assert executors[0].num_from_device > 0
        stack.verifier.check_integrity()
    reference = OneTokenLoop(tmp_path / "target", _MAX_MODEL_LEN, num_threads=1)
    assert sum(check_request(reference, request, result) for request, result in zip(requests, results, strict=True)) < 3
