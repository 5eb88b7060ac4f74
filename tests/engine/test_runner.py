"""The runner and its parts: rows of logits, the cache's layout, CUDA in eager mode."""

import pytest
import torch

from specwire.engine.batch import RaggedBatch, Segment
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig, RopeConfig
from specwire.engine.models.loader import dummy_model
from specwire.engine.runner import ModelRunner
from tests.engine.tiny_models import compute, make_runner

CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    qk_norm=True,
    qkv_bias=True,
)


def test_a_batch_is_flat():
    segments = [Segment([7, 8, 9], 15, [4, 2]), Segment([5], 0, [9])]
    batch = RaggedBatch.from_segments(segments, 16, 1, "cpu", torch.float32)
    assert batch.num_tokens == 4
    assert batch.row_starts == (0, 3, 4)
    assert batch.token_ids.tolist() == [7, 8, 9, 5]
    assert batch.positions.tolist() == [15, 16, 17, 0]
    assert batch.slot_mapping.tolist() == [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [18, 1]
    assert batch.block_tables.tolist() == [[4, 2], [9, 0]]
    assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == batch.block_tables.dtype == torch.int32


@pytest.mark.parametrize("segments", [[], [Segment([], 0, [1])], [Segment([1, 2], 15, [1])]], ids=["none", "no tokens", "short table"])
def test_impossible_batches_are_caught(segments):
    with pytest.raises(AssertionError):
        RaggedBatch.from_segments(segments, 16, 1, "cpu", torch.float32)


def test_logits_of_chosen_rows():
    runner, _ = make_runner(dummy_model(CONFIG, torch.float32, std=0.3))
    hidden = runner.forward(runner.batch([Segment([1, 2, 3, 4], 0, [5])]))
    assert hidden.shape == (4, 32)
    every = runner.logits(hidden, range(4))
    torch.testing.assert_close(runner.logits(hidden, [3, 1]), every[[3, 1]], atol=1e-5, rtol=0)
    assert runner.logits(hidden, []).shape == (0, 50)


def test_logits_of_bfloat16_weights_are_float32_sums():
    """The head's product is not rounded to bfloat16: it equals the float64 product of the same bfloat16 numbers."""
    model = dummy_model(CONFIG, torch.bfloat16, std=0.5)
    exact = dummy_model(CONFIG, torch.float32, std=0.5)
    hidden = torch.randn(5, 32).bfloat16()
    weight = exact.logits(torch.eye(32)).t().bfloat16().double()  # [vocab, hidden]
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.t(), atol=1e-5, rtol=0)


def test_cache_layout():
    cache = KVCache(CONFIG, 5, torch.bfloat16)
    assert cache.key(1).shape == cache.value(1).shape == (6, 16, 2, 16)
    assert cache.scratch_block == 5
    assert KVCache.bytes_per_block(CONFIG, torch.bfloat16) == sum(layer[0].nbytes for layer in cache.layers)
    key_value = torch.arange(2 * 4 * 16).view(2, 4, 16).bfloat16()
    KVCache.write(cache.layers[1], torch.tensor([17, 80]), key_value)
    assert torch.equal(cache.key(1)[1, 1], key_value[0, :2])
    assert torch.equal(cache.value(1)[5, 0], key_value[1, 2:])
    assert int(cache.key(1).ne(0).any(-1).sum() + cache.value(1).ne(0).any(-1).sum()) == 8
    assert not cache.layers[0].any()


def test_results_do_not_depend_on_which_blocks_a_sequence_has():
    model = dummy_model(CONFIG, torch.float32, std=0.3)
    tokens = list(range(40))
    results = []
    for table in ([0, 1, 2], [9, 3, 7]):
        runner = ModelRunner(model, KVCache(CONFIG, 10, torch.float32))
        results.append(runner.forward(runner.batch([Segment(tokens, 0, table)])))
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_cuda_equals_cpu(dtype, tolerance):
    chunks = [{0: list(range(40)), 1: [3]}, {0: [7, 8, 9], 1: [4, 5]}, {1: [6]}]
    results = {}
    for device in ("cpu", "cuda"):
        runner, manager = make_runner(dummy_model(CONFIG, dtype, device, std=0.3))
        for seq_id in (0, 1):
            manager.open(seq_id, [0])
        results[device] = [compute(runner, manager, step) for step in chunks]
    for ours, theirs in zip(results["cpu"], results["cuda"], strict=True):
        for seq_id, logits in ours.items():
            assert theirs[seq_id].dtype == torch.float32
            torch.testing.assert_close(theirs[seq_id].cpu(), logits, atol=tolerance, rtol=0)
