"""Passes in float16 tiles: near the same weights in float32, the same whatever is computed with them, and bad only where something is bad."""

import logging
import math

import pytest
import torch

import specwire.engine.models.format_choice as format_choice
import specwire.engine.models.loader as loader
from specwire.engine.batch import Segment
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.dummy import DummySource
from specwire.engine.models.loader import build_decoder, dummy_model, tensor_shapes
from specwire.engine.models.weights import WeightsRequest, uses_half_tiles
from tests.engine.cpu.test_tiled import MODELS, PLAIN, PROMPT, logits_of, make_config, make_runner, rounded_keys_and_values

__all__ = ["rounded_keys_and_values"]

pytestmark = [
    pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_fp16"), reason="this CPU has no AVX512-FP16"),
    pytest.mark.timeout(600),  # the first test compiles, some 10 s of CPU time
]
STD = 0.1


@pytest.fixture
def half_tiles(monkeypatch):
    """Models in bf16 take them even where a CPU has AMX."""
    monkeypatch.setattr(loader, "uses_half_tiles", lambda weights, config, device: weights == "bf16")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_half(config: ModelConfig) -> Decoder:
    model = dummy_model(config, torch.bfloat16, std=STD, weights="bf16")
    assert model.is_tiled
    return model


def make_exact(config: ModelConfig) -> Decoder:
    """In float32, with `make_half`'s numbers."""
    source = DummySource(tensor_shapes(config), torch.bfloat16, "cpu", 0, STD)
    return build_decoder(config, source.read, torch.float32, "cpu", lambda: "exact")


def relative_errors(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (result.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)


@pytest.mark.usefixtures("half_tiles", "rounded_keys_and_values")
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_float32_and_do_not_depend_on_what_is_computed_with_them(name):
    config = make_config(name)
    expected = logits_of(make_runner(make_exact(config)), Segment(PROMPT, 0, range(6)))
    model = make_half(config)
    whole = logits_of(make_runner(model), Segment(PROMPT, 0, range(6)))
    runner = make_runner(model)
    parts = [logits_of(runner, Segment(PROMPT[a:b], a, range(6))) for a, b in ((0, 50), (50, 51), (51, 57), (57, 68), (68, 90))]
    assert torch.equal(torch.cat(parts), whole)
    error = relative_errors(whole, expected).max()
    assert error < 0.01, f"relative error {error}"


@pytest.mark.usefixtures("half_tiles")
def test_any_number_of_threads_gives_the_same_bits():
    before = torch.get_num_threads()
    segments = [Segment(PROMPT[:33], 0, [3, 9, 1]), Segment(PROMPT[5:6], 0, [2]), Segment(PROMPT[40:47], 0, [5])]
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            runner = make_runner(make_half(make_config()))
            results += [logits_of(runner, *segments) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert results[0].std() > 0.1, "the comparison needs logits of some size"
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.usefixtures("half_tiles")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_keys_make_their_own_sequence_bad_alone(bad):
    runner = make_runner(make_half(make_config()))
    first, second = Segment(PROMPT[:20], 0, [0, 1]), Segment(PROMPT[:20], 0, [2, 3])
    assert logits_of(runner, first, second).isfinite().all()
    runner.kv_cache.layers[1][2, 5, 1] = bad
    logits = logits_of(runner, *[Segment(PROMPT[20:23], 20, segment.block_table) for segment in (first, second)])
    assert logits[:3].isfinite().all()
    assert not logits[3:].isfinite().any()


def test_bfloat16_weights_are_exact_in_any_range():
    from specwire.engine.cpu.half_linear import HalfLinear  # here: brings a compiler

    weight = random(80, 96) * torch.logspace(-30, 30, 80)[:, None]
    weight = weight.bfloat16().float()
    weight[7] = 0.0
    assert torch.equal(HalfLinear(weight)(torch.eye(96)).t(), weight)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 12, 13, 29])
def test_products_are_nearer_to_exact_ones_than_those_of_rows_in_bfloat16(num_rows):
    from specwire.engine.cpu.half_linear import HalfLinear

    weight, x, bias = (random(208, 192, seed=1) * 0.1).bfloat16(), random(num_rows, 192, seed=2), random(208, seed=3)
    linear, exact = HalfLinear(weight, bias), x.double() @ weight.double().t() + bias
    result = linear(x)
    rounded = x.bfloat16().double() @ weight.double().t() + bias
    assert relative_errors(result, exact).mean() < relative_errors(rounded, exact).mean()
    for row in range(num_rows):
        assert torch.equal(linear(x[row : row + 1])[0], result[row])


def test_rows_have_any_size_and_what_is_no_number_stays_in_its_row():
    from specwire.engine.cpu.half_linear import HalfLinear

    weight, x = (random(64, 64, seed=1)).bfloat16(), random(8, 64, seed=2)
    x[0], x[1], x[2], x[3, 5] = 0.0, 1e-30 * x[1], 1e30 * x[2], 1e4
    x[4, 9], x[5, 9] = math.nan, -math.inf
    result = HalfLinear(weight)(x)
    assert torch.equal(result[0], torch.zeros(64))
    assert relative_errors(result[[1, 2, 3, 6, 7]], x[[1, 2, 3, 6, 7]] @ weight.float().t()).max() < 3e-3
    assert not result[4:6].isfinite().any()
    most = HalfLinear(torch.full((32, 1024), 1.9921875))(torch.full((1, 1024), 511.0))
    torch.testing.assert_close(most, torch.full((1, 32), 1024 * 511 * 1.9921875), rtol=4e-3, atol=0.0)  # float16 would end at 65504


def test_auto_takes_them_without_measuring(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_fp16": True})
    monkeypatch.setattr(format_choice, "fastest_format", lambda *_: pytest.fail("measured"))
    assert format_choice.choose_format(WeightsRequest(), ModelConfig(**PLAIN), "cpu", has_q4=False, may_measure=True) == "bf16"


def test_other_shapes_and_other_processors_take_torch_and_the_log_says_why(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    config = ModelConfig(**PLAIN)
    able = {"avx512_fp16": True, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert uses_half_tiles("bf16", config, "cpu")
    assert not uses_half_tiles("", config, "cpu")
    assert not uses_half_tiles("bf16", config, "cuda")
    assert not caplog.messages
    narrow = ModelConfig(**PLAIN | {"head_dim": 8, "num_heads": 12, "num_kv_heads": 4})
    assert not dummy_model(narrow, torch.bfloat16, weights="bf16").is_tiled
    assert "not in float16 tiles: they need a head_dim that is a multiple of 16, here 8" in caplog.text
    able["amx_bf16"] = True
    assert not uses_half_tiles("bf16", config, "cpu")
    assert "this CPU has AMX" in caplog.text
    able["avx512_fp16"] = able["amx_bf16"] = False
    assert not uses_half_tiles("bf16", config, "cpu")
    assert "this CPU has no AVX512-FP16" in caplog.text
