"""Weights in 4 and 8 bits: exact against the file, near enough in the logits, chosen and refused as promised, and never taken for others."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from specwire.engine import cache_dir
from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL, default_model_file
from specwire.engine.gguf import GGUFFile
from specwire.engine.gguf_convert import hf_name
from specwire.engine.kernels.linear import LogitsHead
from specwire.engine.kernels.packed_linear import DigitLinear, Int4Linear, Int8Linear, Q4Weight
from specwire.engine.models import format_choice
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import build_decoder, load_model, open_model
from specwire.engine.models.stored_q4 import StoredQ4
from specwire.engine.models.weights import WeightsRequest, check_weights
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.tokenizer import Tokenizer
from tests.engine.tiny_models import compute, make_runner, save_tiny_model
from tests.verifier.harness import tiny_config

MAX_KL = 0.002
DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def random_weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))


# --- layers ---------------------------------------------------------------------------------------------------------


def test_rounding_to_4_bits_takes_the_nearest_of_16():
    weight = random_weight(48, 96)
    weight[3, 32:64] = 0.7  # a group without range
    groups = weight.unflatten(1, (-1, 32))
    steps = (groups.amax(2) - groups.amin(2)) / 15
    error = (Q4Weight.rounded(weight).dequantised() - weight).abs().unflatten(1, (-1, 32))
    assert (error <= steps[:, :, None] / 2 + 1e-6).all()
    assert torch.equal(Q4Weight.rounded(weight).dequantised()[3, 32:64], weight[3, 32:64])


@pytest.mark.parametrize("out_features", [16, 64, 80, 176])  # the kernel packs blocks of 64 features, and the rest, in different ways
def test_the_4_bit_layer_multiplies_with_the_codes_it_was_given(out_features):
    """Rows of the identity read the weight back: each code's scale and zero point rounded to bfloat16, nothing else."""
    weight = Q4Weight.rounded(random_weight(out_features, 64))
    scale, minimum = weight.scale.repeat_interleave(32, 1), weight.minimum.repeat_interleave(32, 1)
    zero = (minimum + 8 * scale).bfloat16().double()
    expected = (weight.codes.double() - 8) * scale.bfloat16().double() + zero
    read_back = Int4Linear(weight)(torch.eye(64, dtype=torch.bfloat16)).t()
    torch.testing.assert_close(read_back.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 6, 8, 11])
@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
def test_layers_are_near_the_dense_product_whatever_the_number_of_rows(kind, num_rows):
    dense, bias = random_weight(80, 576), random_weight(1, 80, 2)[0].bfloat16()
    q4 = Q4Weight.rounded(dense)
    linear = Int4Linear(q4, bias) if kind is Int4Linear else Int8Linear(dense, bias)
    x = random_weight(num_rows, 576, 3).bfloat16()
    expected = x.float() @ (q4.dequantised() if kind is Int4Linear else dense).t() + bias.float()
    output = linear(x)
    assert output.dtype == torch.bfloat16
    assert linear.plain_weight is None
    assert linear.bias is bias
    error = (output.float() - expected).norm() / expected.norm()
    assert error < 0.01, f"relative error {error}"
    for row in range(num_rows):
        assert torch.equal(linear(x[row : row + 1])[0], output[row]), f"row {row} depends on the {num_rows} it is computed with"


@pytest.mark.parametrize("num_rows", [1, 6, 33])
def test_8_bit_heads_round_the_weight_and_nothing_else(num_rows):
    weight = random_weight(100, 576)
    hidden = random_weight(num_rows, 576, 4) * torch.logspace(-3, 3, num_rows)[:, None]
    hidden[0, 5] = 0.0
    weight[:, 3] *= 20  # stays as it is
    columns = weight.square().mean(0).topk(576 // 32).indices
    rest = weight.index_fill(1, columns, 0.0)
    scale = rest.abs().amax(1, keepdim=True) / 127
    rounded = (rest / scale).round() * scale
    rounded[:, columns] = weight[:, columns]
    expected = hidden.double() @ rounded.double().t()
    head = LogitsHead(weight, DigitLinear(weight))
    logits = head(hidden)
    assert logits.dtype == torch.float32
    error = (logits - expected).abs().amax(1) / hidden.abs().amax(1)
    assert (error < 576**0.5 * 4 / 2**14).all(), f"in units of the greatest hidden state: {error}"
    written = torch.full_like(logits, math.nan)
    head.write(hidden.bfloat16().float(), written)
    assert torch.equal(written, head(hidden.bfloat16().float()))
    for row in range(num_rows):
        assert torch.equal(head(hidden[row : row + 1])[0], logits[row])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_gone_bad_stay_bad_behind_an_8_bit_head(bad):
    hidden = random_weight(2, 64)
    hidden[1, 7] = bad
    logits = DigitLinear(random_weight(32, 64))(hidden)
    assert logits[0].isfinite().all()
    assert not logits[1].isfinite().any()
    assert torch.equal(DigitLinear(random_weight(32, 64))(torch.zeros(1, 64)), torch.zeros(1, 32))


def test_shapes_that_the_kernel_does_not_take_are_refused():
    for shape in ((24, 64), (64, 48)):
        with pytest.raises(UnsupportedError, match=rf"{shape[0]} x {shape[1]} can't be kept in 4 bits.*multiples of 16 and 32.*--weights bf16"):
            Int4Linear(Q4Weight(torch.zeros(shape, dtype=torch.uint8), torch.ones(shape[0], 2), torch.zeros(shape[0], 2)))


# --- the default model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def gguf() -> GGUFFile:
    return GGUFFile(default_model_file())


def dequantised(stored_q4: StoredQ4, gguf: GGUFFile, name: str) -> torch.Tensor:
    """The file's own numbers in float32, in Hugging Face's order."""
    stored = stored_q4.read([name])
    if stored is not None:
        return stored.dequantised()
    [theirs] = [gguf_name for gguf_name in gguf.tensors if hf_name(gguf_name) == name]
    return torch.tensor(gguf.tensor(theirs))


def test_stored_4_bit_weights_are_the_files_to_the_last_bit(folder, gguf):
    """Every tensor, dequantised, against what the reader makes of the file (the rows of q and k stand in another order there)."""
    stored, num_tensors = StoredQ4(folder), 0
    for name in gguf.tensors:
        weight = stored.read([hf_name(name)])
        assert (weight is not None) == (gguf.tensors[name].ggml_type == 3), name
        if weight is None:
            continue
        values, expected = weight.dequantised(), torch.tensor(gguf.tensor(name))
        if ".attn_q." in name or ".attn_k." in name:
            heads = len(expected) // 64
            expected = expected.view(heads, 32, 2, -1).transpose(1, 2).reshape(expected.shape)
        assert torch.equal(values, expected), name
        num_tensors += 1
    assert num_tensors == 210


@torch.inference_mode()
def test_logits_in_4_bits_are_near_those_of_the_dequantised_weights(folder, gguf):
    tokenizer, config = Tokenizer.from_folder(folder), ModelConfig.from_folder(folder)
    stored = StoredQ4(folder)
    exact = build_decoder(config, lambda name: dequantised(stored, gguf, name), torch.float32, "cpu", lambda: "exact")
    models = {"exact": exact, "int4": load_model(folder, torch.bfloat16, weights="int4")}
    divergences = []
    for name in ("chat", "copy"):
        text = json.loads((DATA / f"{name}.jsonl").read_text().splitlines()[0])["turns"][0]
        tokens = tokenizer.encode_chat([{"role": "user", "content": text}])[:40]
        log_probs = {}
        for kind, model in models.items():
            runner, manager = make_runner(model)
            manager.open(0, tokens)
            log_probs[kind] = compute(runner, manager, {0: tokens})[0].log_softmax(-1)
        divergences.append((log_probs["exact"].exp() * (log_probs["exact"] - log_probs["int4"])).sum(-1))
    mean = torch.cat(divergences).mean().item()
    assert 1e-6 < mean <= MAX_KL, f"KL {mean}"


# --- what is chosen -------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """ms of one row and of more, by format; what was measured is not remembered from one test to the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ms = {"int4": (1.0, 4.0), "bf16": (3.0, 3.5), "fp32": (6.0, 9.0)}
    calls = []

    def measure(candidates, shapes, num_rows):
        calls.append(tuple(candidates))
        first, *others = candidates
        fastest = min(others, key=lambda name: sum(ms[name]))
        chosen = fastest if sum(ms[fastest]) < 0.75 * sum(ms[first]) else first
        return {"chosen": chosen, "num_weights": 100, "ms": {name: ms[name] for name in candidates}}

    monkeypatch.setattr(format_choice, "_measure", measure)
    monkeypatch.setattr(format_choice, "uses_tiles", lambda weights: False)
    return ms, calls


CONFIG = tiny_config()


def choose(request: WeightsRequest, has_q4: bool = False, may_measure: bool = True) -> str:
    return format_choice.choose_format(request, CONFIG, "cpu", has_q4=has_q4, may_measure=may_measure)


def test_auto_is_measured_once_among_what_the_checkpoint_allows(measured, caplog):
    ms, calls = measured
    caplog.set_level(logging.INFO)
    assert choose(WeightsRequest(), has_q4=True) == "int4"
    assert "weights in int4, as was measured here" in caplog.text
    assert "int4 1.00 and 4.00, bf16 3.00 and 3.50" in caplog.text
    assert choose(WeightsRequest(), has_q4=False) == "bf16"
    assert calls == [("int4", "bf16"), ("bf16", "fp32")]
    ms["bf16"] = (0.1, 0.1)
    assert choose(WeightsRequest(), has_q4=True) == "int4", "what was measured before is remembered"
    assert choose(WeightsRequest(num_rows=9), has_q4=True) == "bf16", "another number of rows is another question"


def test_what_is_asked_for_is_taken_without_measuring(measured):
    for weights in ("int4", "int8", "bf16", "fp32"):
        assert choose(WeightsRequest(weights)) == weights
    assert choose(WeightsRequest(dtype=torch.float32), has_q4=True) == "fp32"
    assert choose(WeightsRequest(dtype=torch.bfloat16), has_q4=True) == "bf16"
    assert choose(WeightsRequest(), may_measure=False) == "bf16"
    assert format_choice.choose_format(WeightsRequest(), CONFIG, "cuda", has_q4=True, may_measure=True) == "bf16"
    assert measured[1] == []


@pytest.mark.parametrize(
    ("request_", "device", "match"),
    [
        (WeightsRequest("int4"), "cuda:1", "--weights is int4, but --device is cuda: formats are for CPUs.*leave weights at auto"),
        (WeightsRequest("bf16"), "cuda", "--weights is bf16, but --device is cuda"),
        (WeightsRequest("int4", torch.float32), "cpu", "--dtype is float32, but --weights is int4, which is computed in bfloat16; leave one"),
        (WeightsRequest("fp32", torch.bfloat16), "cpu", "--dtype is bfloat16, but --weights is fp32, which is computed in float32"),
    ],
)
def test_what_does_not_go_together_is_refused(request_, device, match):
    with pytest.raises(InvalidArgumentError, match=match):
        check_weights(request_, device)


def test_a_real_measurement_gives_times_of_all_candidates():
    decision = format_choice._measure(("int4", "bf16"), [(64, 64), (64, 96)], 6)
    assert decision["chosen"] in ("int4", "bf16")
    assert all(0 < one < math.inf and 0 < many < math.inf for one, many in decision["ms"].values())


def test_of_processes_that_measure_at_once_all_get_the_first_ones_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir.remembered("kind", "key", lambda: cache_dir.remembered("kind", "key", lambda: "first") and "second") == "first"
    assert cache_dir.remembered("kind", "key", lambda: "third") == "first"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_no_kernel_on_cuda_takes_is_refused_before_it_is_loaded(tmp_path, load_format):
    save_tiny_model(tmp_path, "llama", head_dim=12)
    with pytest.raises(UnsupportedError, match="head_dim is 12, but on CUDA only 16, 32, 64, 128 are built; use device cpu"):
        open_model(tmp_path, load_format=load_format, dtype="auto", device="cuda")
    assert open_model(tmp_path, load_format=load_format, dtype="float32", device="cpu").config.head_dim == 12


# --- whole models ---------------------------------------------------------------------------------------------------


def test_formats_have_hashes_of_their_own_and_near_logits(tmp_path):
    """A checkpoint without 4-bit weights: they are rounded."""
    save_tiny_model(tmp_path, "llama-biases")
    tokens = list(range(40))
    logits, hashes = {}, {}
    for weights in ("fp32", "bf16", "int8", "int4"):
        model = open_model(tmp_path, load_format="auto", dtype="auto", device="cpu", weights=weights)
        runner, manager = make_runner(model)
        manager.open(0, tokens)
        logits[weights], hashes[weights] = compute(runner, manager, {0: tokens})[0], (model.weights_hash, model.dtype)
    assert len(set(hashes.values())) == 4
    distance = {weights: ((values - logits["fp32"]).norm() / logits["fp32"].norm()).item() for weights, values in logits.items()}
    assert 0 < distance["bf16"] < 0.04
    assert distance["bf16"] < distance["int8"] < 0.1, distance
    assert distance["int8"] < distance["int4"] < 0.6, distance
    dummy = open_model(tmp_path, load_format="dummy", dtype="auto", device="cpu", weights="int4")
    assert dummy.weights_hash not in {digest for digest, _ in hashes.values()}
