"""Half batches over real services: greedy and seeded tokens are those of one token after the other, with rounds that take their time."""

import asyncio
import random
from pathlib import Path

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
_K = 3


async def test_random_requests_are_the_references(socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "target", eos_token_id=[257, 5, 9])
    save_noisy(tmp_path / "target", tmp_path / "draft", 0.03)
    config = verifier_config(
        tmp_path / "target", num_speculative_tokens=_K, max_model_len=_MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=40
    )  # fmt: skip
    limits = RoundLimits(config.max_num_seqs, _K, config.max_num_batched_tokens, _MAX_MODEL_LEN)

    def make_executor(runner: ModelRunner) -> SlowExecutor:
        rounds = RoundRunner(runner.model, runner.kv_cache, limits, num_in_flight=config.max_outstanding_rounds)
        return SlowExecutor(RoundExecutor(rounds, runner.kv_cache, limits.max_num_seqs), 0.002)

    monkeypatch.setattr(loading, "ModelExecutor", make_executor)
    requests = random_requests(random.Random(5))[:20]
    drafter = drafter_config(tmp_path / "draft", num_speculative_tokens=_K)
    async with tiny_stack(socket_dir, config, drafter, speculation={"num_speculative_tokens": _K}, half_batches_from=2) as stack:
        lane = stack.coordinator.engine.lanes[0]
        most, launch = 0, lane.launch

        def count(*arguments: object) -> None:
            nonlocal most
            launch(*arguments)  # type: ignore[arg-type]
            most = max(most, sum(any(row.draft_tokens for row in round_.rows) for round_ in lane.in_flight))

        monkeypatch.setattr(lane, "launch", count)
        results = await asyncio.gather(*(stack.client.generate(prompt, params) for prompt, params in requests))
        counters = stack.coordinator.engine.counters
        assert most == 2, "two rounds with drafts are in flight at once"
        assert counters.num_accepted_tokens > 0
        assert counters.num_bad_rows == counters.num_stale_rows == 0
        stack.verifier.check_integrity()
    reference = OneTokenLoop(tmp_path / "target", _MAX_MODEL_LEN, num_threads=1)
    assert sum(check_request(reference, request, result) for request, result in zip(requests, results, strict=True)) < 3
