"""A pass through the layers gives the same whatever kernels are chosen."""

from types import SimpleNamespace

import pytest
import torch

from specwire.engine.graphs.backends import TorchBackend, TritonBackend
from specwire.engine.graphs.layers import run_layers
from specwire.engine.kernels.linear import LogitsHead
from specwire.engine.kernels.options import KernelOptions, Product, ProductTuning, RowCut, RowProduct, RowTuning
from specwire.engine.kernels.row_stream import row_stream
from specwire.engine.kv_cache import KVCache
from tests.engine.kernels.conftest import early_start  # noqa: F401 (a fixture)
from tests.verifier.harness import tiny_model

DEVICE = torch.device("cpu")


def run_pass(model, backend, num_tokens):
    """Hidden states and the KV of one token of each of some sequences, behind 5 and more."""
    inputs = SimpleNamespace(
        token_ids=torch.arange(3, 3 + num_tokens, device=DEVICE),
        positions=torch.arange(5, 5 + num_tokens, device=DEVICE),
        slot_mapping=torch.arange(num_tokens, device=DEVICE) * 17 + 5,
        cu_seqlens_q=torch.arange(num_tokens + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.arange(6, 6 + num_tokens, dtype=torch.int32, device=DEVICE),
        block_tables=torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)[:, None],
    )
    cache = KVCache(model.config, num_tokens, model.dtype, DEVICE)
    for number, layer in enumerate(cache.layers):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(number)))
    attention = backend.attention(num_tokens, num_tokens, 1)
    attention.update(inputs)
    return run_layers(model, cache, backend, inputs, attention), torch.stack([layer[:num_tokens] for layer in cache.layers])


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_early_starts_and_own_products(monkeypatch, early_start, num_tokens):  # noqa: F811
    monkeypatch.setattr("specwire.engine.kernels.linear._can_pack", lambda weight: False)  # weights as a GPU has them
    model = tiny_model(head_dim=16)
    shapes = {tuple(linear.plain_weight.shape) for layer in model.weights.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)}
    tuning = ProductTuning(features=16, depth=16, splits=2, num_stages=2, prefetch_depth=32)
    options = KernelOptions(starts_early=True, products=tuple(Product(16, *shape, tuning) for shape in shapes))
    expected, expected_kv = run_pass(model, TorchBackend(model.config, DEVICE, model.dtype, 16), num_tokens)
    for backend in (TritonBackend(model.config, DEVICE), TritonBackend(model.config, DEVICE, options)):
        hidden, kv = run_pass(model, backend, num_tokens)
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kv, expected_kv, atol=1e-4, rtol=1e-4)
    assert early_start.instructions.count("announce") == early_start.instructions.count("wait") > 0
    assert bool(early_start.prefetched) == (num_tokens > 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("fused_rows", [0, 2])
def test_streamed_rows(monkeypatch, early_start, num_tokens, fused_rows):  # noqa: F811
    """Of one and two tokens, also with norms, sums and gates inside; three take the library's products."""
    monkeypatch.setattr("specwire.engine.kernels.linear._can_pack", lambda weight: False)  # weights as a GPU has them
    model = tiny_model(head_dim=16)
    layer = model.weights.layers[0]
    shapes = {tuple(linear.plain_weight.shape) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)}
    options = KernelOptions(
        starts_early=True,
        row_products=tuple(RowProduct(*shape, RowTuning(numbers=512, num_programs=3)) for shape in shapes),
        streamed_rows=2,
        fused_rows=fused_rows,
        attention_split=64,
    )
    backend = TritonBackend(model.config, DEVICE, options)
    assert (backend.fused(model, num_tokens) is not None) == (num_tokens <= fused_rows)
    hidden, kv = run_pass(model, backend, num_tokens)
    expected, expected_kv = run_pass(model, TorchBackend(model.config, DEVICE, model.dtype, 16), num_tokens)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv, expected_kv, atol=1e-4, rtol=1e-4)
    assert bool(early_start.instructions) == (num_tokens == 1 or num_tokens <= fused_rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
def test_the_head_is_streamed(monkeypatch):
    monkeypatch.setattr("specwire.engine.kernels.linear._can_pack", lambda weight: False)
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(70, 32, generator=generator), torch.randn(2, 32, generator=generator)
    head = LogitsHead(weight, linear=None)
    model = tiny_model(head_dim=16)
    monkeypatch.setattr(head, "_linear", None)  # as on a GPU
    streamed = []
    monkeypatch.setattr("specwire.engine.kernels.row_stream.row_stream", lambda *args, **options: streamed.append(row_stream(*args, **options)))
    options = KernelOptions(row_products=(RowProduct(70, 32, RowTuning(numbers=64)),), streamed_rows=2)
    for num_rows in (1, 2):
        for each in (options, KernelOptions()):
            logits = torch.zeros(num_rows, 70)
            TritonBackend(model.config, DEVICE, each).head(head, hidden[:num_rows], logits)
            torch.testing.assert_close(logits, hidden[:num_rows] @ weight.t(), atol=1e-5, rtol=1e-5)
    assert len(streamed) == 2


def test_a_cut_is_the_weight_s_own_or_that_of_all():
    own, common = RowCut(2, 2048), RowCut(8, 64)
    options = KernelOptions(row_cut=common, row_products=(RowProduct(6, 4, own), RowProduct(4, 6)))
    assert [options.cut_of(torch.empty(*shape)) for shape in ((6, 4), (4, 6), (4, 4))] == [own, common, common]
    assert [options.row_tuning(torch.empty(*shape)) for shape in ((6, 4), (4, 6), (4, 4))] == [None, RowTuning(), None]
