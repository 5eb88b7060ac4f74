"""Features of every kind against transformers' hidden states, through every forward pass that this machine has."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import transformers

from specwire.engine.batch import Segment
from specwire.engine.features.pages import FeaturePages
from specwire.engine.graphs.backends import Backend, TorchBackend, TritonBackend
from specwire.engine.graphs.layers import run_layers
from specwire.engine.heads.source import FINAL_LAYER, FeatureSource
from specwire.engine.kernels.packed_linear import DigitLinear
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import load_model
from specwire.engine.runner import ModelRunner
from specwire.errors import InvalidArgumentError
from tests.engine.features.sources import eagle3_source, eagle_source, make_source
from tests.engine.tiny_models import save_tiny_model
from tests.verifier.harness import tiny_config, tiny_model

HIDDEN, LAYERS = 64, 3
SOURCES = (
    eagle3_source(LAYERS, HIDDEN),
    eagle_source(HIDDEN),
    make_source((1, 3), HIDDEN, width=40, norms="each", name="norm of each"),
    make_source((2, 1), HIDDEN, width=16, norms="all", name="norm of all"),
    make_source((3, 0), HIDDEN, name="as they are"),
)
TOKENS = [(7 * index * index + 3) % 256 for index in range(70)]


@torch.inference_mode()
def hidden_states(reference: transformers.PreTrainedModel, tokens: Sequence[int]) -> dict[int, torch.Tensor]:
    """Of one sequence, by layer id [n, hidden_size], as the modules themselves see them."""
    states: dict[int, torch.Tensor] = {}
    layers, norm = reference.model.layers, reference.model.norm
    hooks = [
        *(layer.register_forward_pre_hook(lambda _, inputs, index=index: states.update({index: inputs[0][0]})) for index, layer in enumerate(layers)),
        norm.register_forward_pre_hook(lambda _, inputs: states.update({len(layers): inputs[0][0]})),
        norm.register_forward_hook(lambda _, inputs, output: states.update({FINAL_LAYER: output[0]})),
    ]
    reference(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return states


def expected_features(source: FeatureSource, states: dict[int, torch.Tensor]) -> torch.Tensor:
    """What the head's definition says, from the states of one sequence."""
    parts = [states[layer_id].double() for layer_id in source.layer_ids]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + source.norm_eps).sqrt() * weight.double()

    if source.norms is not None and len(source.norms) == len(parts):
        parts = [normed(part, weight) for part, weight in zip(parts, source.norms, strict=True)]
    wide = torch.cat(parts, -1)
    if source.norms is not None and len(source.norms) != len(parts):
        wide = normed(wide, source.norms[0])
    return (wide if source.projection is None else wide @ source.projection.double().T).float()


def stored(pages: FeaturePages, index: int, table: Sequence[int], count: int) -> torch.Tensor:
    """A sequence's first features of a head, by its block table."""
    return pages.heads[index].pages[list(table)].flatten(0, 1)[:count].float()


def test_every_kind_equals_the_hidden_states_of_transformers(tmp_path):
    """Two sequences, in ragged chunks, on blocks that lie anywhere."""
    reference = save_tiny_model(tmp_path, "qwen2")
    model = load_model(tmp_path, torch.float32)
    cache = KVCache(model.config, 12, model.dtype, features=SOURCES)
    assert cache.features is not None
    for head in cache.features.heads:
        head.pages.fill_(float("nan"))
    runner = ModelRunner(model, cache)
    other, tables = TOKENS[::-1][:33], ([9, 2, 11, 0, 5], [7, 1, 3])
    for (a, b), (c, d) in zip([(0, 1), (1, 30), (30, 47), (47, 70)], [(0, 5), (5, 6), (6, 32), (32, 33)], strict=True):
        runner.forward(runner.batch([Segment(TOKENS[a:b], a, tables[0]), Segment(other[c:d], c, tables[1])]))
    for tokens, table in ((TOKENS, tables[0]), (other, tables[1])):
        states = hidden_states(reference, tokens)
        for index, source in enumerate(SOURCES):
            found = stored(cache.features, index, table, len(tokens))
            torch.testing.assert_close(found, expected_features(source, states), atol=1e-4, rtol=1e-4, msg=source.name)
    assert cache.features.heads[0].pages[4].isnan().all(), "a block of nobody was written"


def test_a_pass_without_heads_keeps_nothing():
    cache = KVCache(tiny_config(), 2, torch.float32)
    taps = cache.taps()
    taps.take(0, torch.zeros(1, 32))
    assert (cache.features, taps.states) == (None, {})


def run_row(model: Decoder, backend: Backend) -> torch.Tensor:
    """One token behind a made-up context, in the way of rounds; its features of both heads."""
    inputs = SimpleNamespace(
        token_ids=torch.tensor([3]), positions=torch.tensor([5]), slot_mapping=torch.tensor([21]),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), seq_lens=torch.tensor([6], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
    )  # fmt: skip
    cache = KVCache(model.config, 2, model.dtype, features=[eagle3_source(2, 32), eagle_source(32)])
    for number, layer in enumerate(cache.layers):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(number)))
    attention = backend.attention(1, 1, 1)
    attention.update(inputs)
    run_layers(model, cache, backend, inputs, attention)
    assert cache.features is not None
    return torch.cat([head.pages[1, 5] for head in cache.features.heads])


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
def test_kernels_of_a_gpu_write_what_their_twins_write(monkeypatch):
    monkeypatch.setattr("specwire.engine.kernels.linear._can_pack", lambda weight: False)  # weights as a GPU has them
    model, device = tiny_model(head_dim=16), torch.device("cpu")
    expected = run_row(model, TorchBackend(model.config, device, model.dtype, 16))
    found = run_row(model, TritonBackend(model.config, device))
    assert expected.abs().min() > 0
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not DigitLinear.is_fast(), reason="this CPU has no 512-bit integer dot products")
@pytest.mark.parametrize("layer_ids", [(0, 1, 3), (2,), (3, FINAL_LAYER), (1, 2, 3, 0)])
def test_a_compiled_pass_in_4_bits_keeps_what_goes_through_it(layer_ids, monkeypatch):
    """The states between its layers make its hidden states, and these do not change."""
    from tests.engine.cpu.test_tiled import PROMPT, make_config, make_pair  # compiles

    # The float32 model rounds what the compiled one rounds: inputs of products (`make_pair`), keys and values.
    write = KVCache.write
    monkeypatch.setattr(KVCache, "write", staticmethod(lambda kv, slots, key_value: write(kv, slots, key_value.bfloat16().to(kv.dtype))))
    tiled, dense = make_pair(make_config())
    hidden_size = tiled.config.hidden_size
    source = make_source(layer_ids, hidden_size)
    plain = KVCache(tiled.config, 8, tiled.dtype)
    caches = [KVCache(model.config, 8, model.dtype, features=[source]) for model in (tiled, dense)]
    hidden, kept = [], []
    for model, cache in zip((tiled, tiled, dense), (plain, *caches), strict=True):
        runner = ModelRunner(model, cache)
        hidden.append(runner.forward(runner.batch([Segment(PROMPT, 0, range(6))])))
        if cache.features is not None:
            kept.append(stored(cache.features, 0, range(6), len(PROMPT)))
    assert torch.equal(hidden[0], hidden[1]), "features changed what the model says"
    for part, (found, expected) in enumerate(zip(kept[0].split(hidden_size, 1), kept[1].split(hidden_size, 1), strict=True)):
        error = (found - expected).norm() / expected.norm()
        assert error < 0.03, f"layer id {layer_ids[part]}: {error:.4f} of the state is off"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (make_source((1, 4), 32, name="deep"), "the head deep reads the target's layer 4, but the target has 2"),
        (make_source((0, 1), 48, width=8, name="wide"), "the head wide reads 96 numbers a token, makes 8, and says 8, but the 2 layers"),
        (dataclasses.replace(make_source((0,), 32, width=8, name="liar"), width=9), "the head liar reads 32 numbers a token, makes 8, and says 9"),
        (dataclasses.replace(make_source((0, 1), 32, name="norms"), norms=(torch.ones(32),)), r"the head norms has norms of widths \[32\]"),
        (dataclasses.replace(make_source((), 32, name="none"), width=0), "the head none reads 0 numbers"),
    ],
)
def test_a_head_of_another_target_is_refused_naming_both(source, reason):
    with pytest.raises(InvalidArgumentError, match=f"{reason}.*use a head made for it"):
        KVCache(tiny_config(), 2, torch.float32, features=[source])


def test_features_count_as_memory_of_a_block():
    config, sources = tiny_config(), [make_source((0, 1), 32, dtype=torch.bfloat16), eagle_source(32)]
    without, with_features = (KVCache.bytes_per_block(config, torch.float32, 16, features) for features in ((), sources))
    assert with_features - without == 16 * (2 * 64 + 4 * 32)
    cache = KVCache(config, 3, torch.float32, features=sources)
    assert cache.features is not None
    assert cache.features.num_bytes == (3 + 1) * (with_features - without)
