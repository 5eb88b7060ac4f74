"""Passes in tiles of 4 bits: near the same weights in float32, whatever the model has, the same for any number of threads, and bad only where
something is bad."""

import gc
import math
import threading

import numpy as np
import pytest
import torch

from specwire.engine.batch import Segment
from specwire.engine.kernels.linear import DenseLinear, LogitsHead
from specwire.engine.kernels.packed_linear import DigitLinear, Q4Weight
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig, RopeConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.layer import LayerWeights
from specwire.engine.models.loader import dummy_model
from specwire.engine.runner import ModelRunner
from specwire.errors import UnsupportedError

pytestmark = [
    pytest.mark.skipif(not DigitLinear.is_fast(), reason="this CPU has no 512-bit integer dot products"),
    pytest.mark.timeout(600),  # the first test compiles, 15 s of CPU time
]

PLAIN = {
    "model_type": "llama", "vocab_size": 203, "hidden_size": 96, "intermediate_size": 160, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2,
    "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope": RopeConfig(),
}  # fmt: skip
MODELS = {
    "plain": {"tie_word_embeddings": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "norms of heads": {"qk_norm": True, "head_dim": 16, "num_heads": 8, "num_kv_heads": 8},
    "one key head": {"num_kv_heads": 1, "head_dim": 64},
}
PROMPT = np.random.default_rng(1).integers(0, 203, 90).tolist()


def make_config(name: str = "plain") -> ModelConfig:
    return ModelConfig(**PLAIN | MODELS[name])


def random_q4(out_features: int, in_features: int, seed: int = 0) -> Q4Weight:
    """With scales that float16 has."""
    q4 = Q4Weight.rounded(torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return Q4Weight(q4.codes, q4.scale.half(), q4.minimum.half())


def as_digits(x: torch.Tensor) -> torch.Tensor:
    """What the products of tiles take for x: groups of 32 in one digit of 8 bits, or two where one of them is large beside its row."""
    groups = x.unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    values = (groups * (16255 / largest)).round().nan_to_num()
    high = ((values + 64) / 128).floor()
    is_fine = largest.square() > 16 * x.square().mean(1)[:, None, None]
    return (torch.where(is_fine, values, 128 * high) * (largest / 16255)).flatten(1)


class DigitsLinear(DenseLinear):
    """Float32 weights, and what tiles take for its input."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(as_digits(x))


def make_pair(config: ModelConfig) -> tuple[Decoder, Decoder]:
    """A tiled model, and one in float32 with its numbers."""
    from specwire.engine.cpu.linear import TiledHead, TiledLinear  # here: the first test compiles

    generator = torch.Generator().manual_seed(7)
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"qkv": (heads + 2 * kv, hidden), "o": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    has_bias = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}

    def vector(size: int, mean: float) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.2 + mean).bfloat16()

    tiled, dense = [], []
    for index in range(config.num_layers):
        norms = {"input_norm": vector(hidden, 1.0), "post_norm": vector(hidden, 1.0)}
        norms |= {name: vector(config.head_dim, 1.0) if config.qk_norm else None for name in ("q_norm", "k_norm")}
        weights = {name: random_q4(*shape, seed=index) for name, shape in shapes.items()}
        biases = {name: vector(shape[0], 0.0) if has_bias[name] else None for name, shape in shapes.items()}
        floats = {name: bias.float() if bias is not None else None for name, bias in biases.items()}
        tiled.append(LayerWeights(**norms, **{name: TiledLinear(weight, biases[name]) for name, weight in weights.items()}))
        dense.append(LayerWeights(**norms, **{name: DigitsLinear(weight.dequantised(), floats[name]) for name, weight in weights.items()}))
    embedding, final_norm = torch.randn(config.vocab_size, hidden, generator=generator).bfloat16(), vector(hidden, 1.0)
    return (
        Decoder(config, embedding, tiled, final_norm, LogitsHead(embedding, TiledHead(embedding)), "tiled", is_tiled=True),
        Decoder(config, embedding.float(), dense, final_norm.float(), LogitsHead(embedding.float(), DigitLinear(embedding)), "dense"),
    )


@pytest.fixture
def rounded_keys_and_values(monkeypatch):
    """A float32 model's keys and values, too, are rounded."""
    write = KVCache.write
    rounded = staticmethod(lambda layer_kv, slots, key_value: write(layer_kv, slots, key_value.bfloat16().to(layer_kv.dtype)))
    monkeypatch.setattr(KVCache, "write", rounded)


def make_runner(model: Decoder) -> ModelRunner:
    """Over a cache full of NaN."""
    runner = ModelRunner(model, KVCache(model.config, 16, model.dtype))
    for layer in runner.kv_cache.layers:
        layer.fill_(math.nan)
    return runner


def logits_of(runner: ModelRunner, *segments: Segment) -> torch.Tensor:
    batch = runner.batch(segments)
    return runner.logits(runner.forward(batch), range(batch.num_tokens))


@pytest.mark.usefixtures("rounded_keys_and_values")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_float32(name):
    tiled, dense = make_pair(make_config(name))
    expected = logits_of(make_runner(dense), Segment(PROMPT, 0, range(6)))
    runner = make_runner(tiled)
    parts = [logits_of(runner, Segment(PROMPT[a:b], a, range(6))) for a, b in ((0, 50), (50, 51), (51, 57), (57, 90))]
    error = (torch.cat(parts) - expected).norm() / expected.norm()
    assert error < 0.03, f"relative error {error}"  # a digit that is rounded the other way is more than what float32 adds


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(num_threads):
    before = torch.get_num_threads()
    segments = [Segment(PROMPT[:33], 0, [3, 9, 1]), Segment(PROMPT[5:6], 0, [2]), Segment(PROMPT[40:47], 0, [5])]
    try:
        torch.set_num_threads(1)
        expected = logits_of(make_runner(make_pair(make_config())[0]), *segments)
        torch.set_num_threads(num_threads)
        runner = make_runner(make_pair(make_config())[0])
        for _ in range(20):
            assert torch.equal(logits_of(runner, *segments), expected)
    finally:
        torch.set_num_threads(before)


def test_helpers_end_with_the_model():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        model = make_pair(make_config())[0]
        logits_of(make_runner(model), Segment(PROMPT, 0, range(6)))
        helpers = [thread for thread in threading.enumerate() if thread.name.startswith("forward-")][-2:]
        assert [thread.is_alive() for thread in helpers] == [True, True]
        del model
        gc.collect()
        for thread in helpers:
            thread.join(timeout=30)
            assert not thread.is_alive()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_bad_keys_and_values_make_their_own_sequence_bad_alone(part, bad):
    runner = make_runner(make_pair(make_config())[0])
    first, second = Segment(PROMPT[:20], 0, [0, 1]), Segment(PROMPT[:20], 0, [2, 3])
    good = logits_of(runner, first, second)
    runner.kv_cache.layers[1][2, 5, part] = bad
    steps = [Segment(PROMPT[20:23], 20, segment.block_table) for segment in (first, second)]
    logits = logits_of(runner, *steps)
    assert good.isfinite().all()
    assert logits[:3].isfinite().all()
    assert not logits[3:].isfinite().any()


def test_a_tiled_layer_multiplies_with_its_codes_scales_and_minimums():
    from specwire.engine.cpu.linear import TiledLinear

    weight = random_q4(48, 96)
    read_back = TiledLinear(weight)(torch.eye(96)).t()
    torch.testing.assert_close(read_back, weight.dequantised(), rtol=1e-6, atol=1e-6)
    x, bias = torch.randn(11, 96, generator=torch.Generator().manual_seed(2)), torch.arange(48.0)
    linear = TiledLinear(weight, bias)
    x[2, 40], x[4, 64:] = 30.0, 0.0
    result = linear(x)
    torch.testing.assert_close(result, as_digits(x) @ weight.dequantised().t() + bias, rtol=1e-5, atol=1e-5)
    for row in range(11):
        assert torch.equal(linear(x[row : row + 1])[0], result[row])


def test_numbers_that_are_large_beside_their_row_get_two_digits():
    """One digit has 254 steps; a number 500 times as large as the rest of its group would round that to nothing."""
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    coarse = (as_digits(x) - x).norm() / x.norm()
    assert 0.001 < coarse < 0.01
    x[:, 40] = 500.0
    rest = torch.arange(96) != 40
    assert (as_digits(x) - x)[:, rest].norm() / x[:, rest].norm() < 0.02
    assert torch.equal(as_digits(x)[:, 40], x[:, 40])


def test_a_tiled_head_has_the_numbers_of_the_other_8_bit_head():
    from specwire.engine.cpu.linear import TiledHead

    generator = torch.Generator().manual_seed(3)
    weight, hidden = torch.randn(100, 64, generator=generator), torch.randn(7, 64, generator=generator)
    hidden[3] = 0.0
    expected = DigitLinear(weight)(hidden)
    error = (TiledHead(weight)(hidden) - expected).norm() / expected.norm()
    assert error < 1e-4, f"relative error {error}"


def test_heads_that_vectors_do_not_fit_into_are_refused():
    with pytest.raises(UnsupportedError, match=r"head_dim 8 can't be computed in 4 bits here.*multiple of 16; take --weights bf16"):
        dummy_model(ModelConfig(**PLAIN | {"head_dim": 8, "num_heads": 12, "num_kv_heads": 4}), torch.bfloat16, weights="int4")
