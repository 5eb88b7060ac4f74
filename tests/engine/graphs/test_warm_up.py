"""The largest work of a runner, done once over a cache of one block: what it touches, and what the runner holds."""

from collections.abc import Callable

import pytest
import torch

from specwire.engine.graphs import draft_forward, forward
from specwire.engine.graphs.backends import Attention, Backend, PassInputs
from specwire.engine.graphs.draft_runner import DraftRunner
from specwire.engine.graphs.layers import run_layers
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from tests.verifier.harness import tiny_config, tiny_model

LIMITS = RoundLimits(max_num_seqs=3, max_num_draft_tokens=2, max_num_batched_tokens=40, max_model_len=128)


def make_draft_runner(model: Decoder, cache: KVCache) -> RoundRunner | DraftRunner:
    return DraftRunner(model, cache, max_num_seqs=3, max_num_drafts=2, max_model_len=128, max_chunk=40)


def make_round_runner(model: Decoder, cache: KVCache) -> RoundRunner | DraftRunner:
    return RoundRunner(model, cache, LIMITS, num_in_flight=1)


@pytest.mark.parametrize(
    ("make", "module", "sizes"),
    [(make_round_runner, forward, [40, 9]), (make_draft_runner, draft_forward, [40, 9, 3])],
    ids=["rounds", "drafting"],
)
def test_it_runs_the_largest_sizes_and_leaves_blocks_alone(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Decoder, KVCache], RoundRunner | DraftRunner], module: object, sizes: list[int]
) -> None:
    model, ran = tiny_model(), []
    cache = KVCache(model.config, 1, model.dtype)
    for layer in cache.layers:
        layer.fill_(float("nan"))

    def run(model: Decoder, kv_cache: KVCache, backend: Backend, inputs: PassInputs, attention: Attention) -> torch.Tensor:
        ran.append(len(inputs.token_ids))
        return run_layers(model, kv_cache, backend, inputs, attention)

    monkeypatch.setattr(module, "run_layers", run)
    runner = make(model, cache)
    runner.warm_up()
    assert ran == sizes
    ran.clear()
    runner.capture()
    assert ran == [16, 32, 40], "a size whose kernels would be compiled while sequences are served"
    for layer in cache.layers:
        assert layer[0].isnan().all(), "a sequence may own that block"


@pytest.mark.parametrize("make", [make_round_runner, make_draft_runner])
def test_there_are_no_graphs_off_a_gpu(make: Callable[[Decoder, KVCache], RoundRunner | DraftRunner]) -> None:
    model = tiny_model()
    assert make(model, KVCache(model.config, 1, model.dtype)).num_graphs == 0


def test_the_table_of_what_a_runner_holds() -> None:
    model = tiny_model()
    held = RoundRunner(model, KVCache(model.config, 1, model.dtype), LIMITS).memory()
    vocab_size = tiny_config().vocab_size
    assert held["logits"] == 9 * vocab_size * 4
    assert held["slots' tables of biases, masks and counts"] == 3 * vocab_size * (4 + 2)
    tables = 2 * 3 * (128 // 16) * 4  # block tables of slots and of a round
    assert tables < held["slots and inputs"] < tables + 40_000
