"""config.json of every supported family, old and new keys, and what is refused by name."""

import json

import pytest

from specwire.engine.models.config import ModelConfig
from specwire.engine.models.rope import inverse_frequencies
from specwire.errors import InvalidArgumentError, UnsupportedError

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}


def test_defaults():
    config = ModelConfig.from_dict(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.rope.rope_type) == (4, 16, 10_000.0, "default")
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("model_type", "extra", "expected"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("mistral", {"sliding_window": None}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_families(model_type, extra, expected):
    config = ModelConfig.from_dict(BASE | {"model_type": model_type} | extra)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_rope_keys_are_equal(keys):
    rope = ModelConfig.from_dict(BASE | keys).rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("linear", 5e5, 4.0)


def test_yarn_without_factor_derives_it():
    rope = ModelConfig.from_dict(BASE | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 2048}}).rope
    assert rope.factor == 4.0
    assert inverse_frequencies(rope, 16)[1] == pytest.approx(1.1386, abs=1e-4)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (2, [7, 2], (7, 2)), (None, 3, (3,)), (None, None, ())],
)
def test_eos_ids_of_both_files(config_eos, generation_eos, expected):
    assert ModelConfig.from_dict(BASE | {"eos_token_id": config_eos}, {"eos_token_id": generation_eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gemma3"}, "'gemma3'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            r"quantised with AWQ \(quantization_config .* use the checkpoint that it was made from, or",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised with GPTQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with FP8 "),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantised with compressed-tensors"),
        ({"quantization_config": {"quant_method": "new"}}, "quantised with new "),
        ({"quantization_config": {"bits": 4}}, "quantised with unknown "),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"model_type": "mistral"}, "sliding_window 4096"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_refuses_by_name(keys, named):
    with pytest.raises(UnsupportedError, match=named):
        ModelConfig.from_dict(BASE | keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "mistral", "sliding_window": 8192},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen3", "sliding_window": 4096},
    ],
)
def test_accepts_windows_that_hide_nothing(keys):
    assert ModelConfig.from_dict(BASE | keys).num_layers == 2


@pytest.mark.parametrize(
    ("config", "method"),
    [({"speculators_model_type": "dspark"}, "dspark"), (BASE | {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3")],
    ids=["without model_type", "with the target's"],
)
def test_a_draft_head_is_no_model(tmp_path, config, method):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=rf"has a draft head \({method}\).* `model` of the speculative configuration, with method {method}"):
        ModelConfig.from_folder(tmp_path)


def test_names_what_is_missing(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"no config\.json"):
        ModelConfig.from_folder(tmp_path)
    incomplete = {key: value for key, value in BASE.items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(incomplete))
    with pytest.raises(InvalidArgumentError, match="hidden_size"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [10**12, 10**30, -1, 1.5, True, "many", [4]])
def test_absurd_sizes_are_refused_at_once(key, value):
    """Whoever built what they say would fail minutes later, out of memory."""
    with pytest.raises(InvalidArgumentError, match=rf"config\.json has {key} .*but it must be an integer from 1 to \d+"):
        ModelConfig.from_dict(BASE | {key: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "much", [1]])
@pytest.mark.parametrize(
    "key",
    [
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "rms_norm_eps", "original_max_position_embeddings",
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused_at_once(key, value):
    parameters = {"rope_type": "yarn", "factor": 2.0} | ({} if key == "rms_norm_eps" else {key: value})
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        ModelConfig.from_dict(BASE | {"rope_parameters": parameters} | ({key: value} if key == "rms_norm_eps" else {}))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_theta": 1.0}, "rope_theta 1, but it must be above 1"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor 4 and high_freq_factor 4"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 10**12}, "original_max_position_embeddings 1000000000000"),
    ],
)
def test_rope_that_gives_no_frequencies(parameters, named):
    with pytest.raises(InvalidArgumentError, match=named):
        ModelConfig.from_dict(BASE | {"rope_parameters": parameters})
