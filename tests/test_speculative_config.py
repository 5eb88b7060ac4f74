"""speculative_config: every field, its aliases, and what is refused by name."""

import dataclasses
import json
import re

import pytest

from specwire.errors import InvalidArgumentError, SpecwireError, UnsupportedError
from specwire.speculative_config import SpeculativeConfig
from specwire.speculative_keys import FOREIGN_KEYS


def test_defaults() -> None:
    config = SpeculativeConfig()
    assert (config.method, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == ("ngram", 5, 2, 4)
    assert (config.rejection_sample_method, config.draft_sample_method) == ("strict", "probabilistic")
    assert config.acceptance_rates() == ()
    assert SpeculativeConfig.from_dict({}) == config


FULL = {
    "method": "draft_model",
    "model": "draft-folder",
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 0]],
    "enable_adaptive_verification": True,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "suffix_decoding_max_tree_depth": 16,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_spec_factor": 2.5,
    "suffix_decoding_min_token_prob": 0.25,
    "suffix_decoding_corpus_tokens": 4096,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.9, 0.5, 0.25],
    "synthetic_acceptance_length": None,
    "draft_sample_method": "greedy",
    "draft_sharpness": 1.5,
    "max_model_len": 1024,
    "use_heterogeneous_vocab": True,
    "parallel_drafting": True,
    "dspark_draft_topk": None,
}


def test_every_field_is_taken() -> None:
    assert set(FULL) == {field.name for field in dataclasses.fields(SpeculativeConfig)}
    config = SpeculativeConfig.from_dict(FULL)
    assert json.loads(config.to_json()) == FULL
    assert config == SpeculativeConfig.from_dict({key.replace("_", "-"): value for key, value in FULL.items()})
    assert hash(config) == hash(SpeculativeConfig.from_json(config.to_json())), "lists must arrive as tuples"


@pytest.mark.parametrize(
    "values",
    [{}, {"method": None}, FULL, {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}, {"model": "some/draft"}],
)
def test_json_round_trip(values: dict) -> None:
    config = SpeculativeConfig.from_dict(values)
    assert SpeculativeConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rejection_sample_method": "standard"}, {"rejection_sample_method": "strict"}),
        ({"rejection-sample-method": "strict"}, {"rejection_sample_method": "strict"}),
        ({"method": None}, {"method": None}),
        ({"model": "ngram"}, {"method": "ngram"}),
        ({"model": "[ngram]"}, {"method": "ngram"}),
        ({"method": "ngram", "model": "[ngram]"}, {"method": "ngram"}),
        ({"model": "owner/name"}, {"method": "draft_model", "model": "owner/name"}),
        ({"prompt_lookup_max": 7}, {"prompt_lookup_min": 7, "prompt_lookup_max": 7}),
        ({"prompt_lookup_min": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": None}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        ({"prompt_lookup_min": None, "prompt_lookup_max": None}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ({"num_speculative_tokens": None}, {"num_speculative_tokens": 5}),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.5, "num_speculative_tokens": 4},
            {"synthetic_acceptance_length": 3.0, "synthetic_acceptance_rates": None},
        ),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1}, {"synthetic_acceptance_length": 6.0}),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0}, {"synthetic_acceptance_length": 1.0}),
    ],
)
def test_aliases_and_inference(values: dict, expected: dict) -> None:
    config = SpeculativeConfig.from_dict(values)
    assert {name: getattr(config, name) for name in expected} == expected


SYNTHETIC = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"num_speculative_token": 3}, ["'num_speculative_token'", "did you mean 'num_speculative_tokens'"]),
        ({"prompt-lookup-maximum": 3}, ["'prompt_lookup_maximum'", "did you mean 'prompt_lookup_max'"]),
        ({"xyz": 0.5}, ["'xyz'", "known keys are method, model"]),
        ({"enable_adaptive_verification": 1}, ["enable_adaptive_verification is 1", "true or false"]),
        ({"enable_adaptive_verifcation": True}, ["'enable_adaptive_verifcation'", "did you mean 'enable_adaptive_verification'"]),
        ({"draft-sample-method": "greedy", "draft_sample_method": "greedy"}, ["'draft_sample_method' twice"]),
        ({"method": "ngrm"}, ["method is 'ngrm'", "ngram, draft_model", "null"]),
        ({"method": ["ngram"]}, ["method is ['ngram']"]),
        ({"method": ["ngram", "ngram"]}, ["two or more different ones of ngram, draft_model, suffix"]),
        ({"method": ["ngram", 3]}, ["method is ['ngram', 3]"]),
        ({"method": []}, ["method is []"]),
        ({"method": ["ngram", "suffix"], "model": "some/draft"}, ["ngram and suffix has no model"]),
        ({"method": 3}, ["method is 3"]),
        ({"method": "draft_model"}, ["model is not set"]),
        ({"method": "draft_model", "model": 3}, ["model is 3", "must be a string"]),
        ({"method": "ngram", "model": "owner/name"}, ["ngram has no model", "'owner/name'"]),
        ({"method": "suffix", "model": "owner/name"}, ["method is suffix", "suffix has no model", "'owner/name'"]),
        ({"suffix_decoding_max_tree_depth": 0}, ["suffix_decoding_max_tree_depth is 0", "from 1 to 256"]),
        ({"suffix_decoding_max_cached_requests": -1}, ["suffix_decoding_max_cached_requests is -1", "from 0"]),
        ({"suffix_decoding_max_spec_factor": -0.1}, ["suffix_decoding_max_spec_factor is -0.1", "from 0 to 256"]),
        ({"suffix_decoding_max_spec_factor": float("inf")}, ["suffix_decoding_max_spec_factor is inf"]),
        ({"suffix_decoding_min_token_prob": 1.01}, ["suffix_decoding_min_token_prob is 1.01", "from 0 to 1"]),
        ({"suffix_decoding_min_token_prob": True}, ["suffix_decoding_min_token_prob is True"]),
        ({"suffix_decoding_corpus_tokens": 0}, ["suffix_decoding_corpus_tokens is 0", "from 1"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens is 0", "from 1 to 128"]),
        ({"num_speculative_tokens": 129}, ["num_speculative_tokens is 129", "from 1 to 128"]),
        ({"num_speculative_tokens": 2.0}, ["num_speculative_tokens is 2.0", "integer"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens is True", "integer"]),
        ({"num_speculative_tokens": "5"}, ["num_speculative_tokens is '5'", "integer"]),
        ({"prompt_lookup_min": 0}, ["prompt_lookup_min is 0", "from 1"]),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 0}, ["prompt_lookup_max is 0", "from 1"]),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, ["prompt_lookup_min is 5", "prompt_lookup_max is 4", "lower the first"]),
        ({"num_speculative_tokens_per_batch_size": []}, ["num_speculative_tokens_per_batch_size", "non-empty list"]),
        ({"num_speculative_tokens_per_batch_size": [[2, 3, 1]]}, ["num_speculative_tokens_per_batch_size", "must start at 1"]),
        ({"num_speculative_tokens_per_batch_size": {"1": 3}}, ["num_speculative_tokens_per_batch_size", "non-empty list"]),
        ({"draft_sample_method": "gumbel"}, ["draft_sample_method is 'gumbel'", "probabilistic or greedy"]),
        ({"draft_sharpness": 0}, ["draft_sharpness is 0", "from 0.1 to 10.0"]),
        ({"draft_sharpness": float("nan")}, ["draft_sharpness is nan"]),
        ({"draft_sharpness": "2"}, ["draft_sharpness is '2'"]),
        ({"max_model_len": 0}, ["max_model_len is 0", "from 1"]),
        ({"rejection_sample_method": "typical"}, ["rejection_sample_method is 'typical'", "strict, probabilistic, synthetic"]),
        ({"rejection_sample_method": ["strict"]}, ["rejection_sample_method is ['strict']"]),
        (SYNTHETIC, ["exactly one of synthetic_acceptance_rates and synthetic_acceptance_length"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, 0, 0], "synthetic_acceptance_length": 2}, ["exactly one of"]),
        ({"synthetic_acceptance_length": 2}, ["need rejection_sample_method synthetic"]),
        ({"synthetic_acceptance_rates": [1, 0, 0, 0, 0]}, ["need rejection_sample_method synthetic"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.5]}, ["has 2 entries", "num_speculative_tokens is 3"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": 0.5}, ["synthetic_acceptance_rates is 0.5", "list of 3 numbers"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5, 0, 0]}, ["synthetic_acceptance_rates[0] is 1.5", "in [0, 1]"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, 0, -0.5]}, ["synthetic_acceptance_rates[2] is -0.5", "in [0, 1]"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, float("nan"), 0]}, ["synthetic_acceptance_rates[1] is nan", "in [0, 1]"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, "1", 0]}, ["synthetic_acceptance_rates[1] is '1'", "in [0, 1]"]),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0]}, ["rise from 0.5 to 0.6", "non-increasing"]),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.9}, ["synthetic_acceptance_length is 0.9", "from 1 to num_speculative_tokens + 1 = 4"]),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.1}, ["synthetic_acceptance_length is 4.1", "= 4"]),
        ({**SYNTHETIC, "synthetic_acceptance_length": True}, ["synthetic_acceptance_length is True"]),
        ({**SYNTHETIC, "synthetic_acceptance_length": float("nan")}, ["synthetic_acceptance_length is nan"]),
        ({**SYNTHETIC, "synthetic_acceptance_rate": 1.5}, ["synthetic_acceptance_rate is 1.5", "[0, 1]"]),
        ({**SYNTHETIC, "synthetic_acceptance_rate": [1, 0, 0]}, ["synthetic_acceptance_rate is [1, 0, 0]", "number"]),
        ({**SYNTHETIC, "synthetic_acceptance_rate": 0.5, "num_speculative_tokens": "3"}, ["num_speculative_tokens is '3'"]),
        (
            {**SYNTHETIC, "synthetic_acceptance_rate": 0.5, "synthetic_acceptance_length": 2},
            ["synthetic_acceptance_rate is 0.5", "synthetic_acceptance_length is set too"],
        ),
        ({"synthetic_acceptance_rate": 0.5}, ["need rejection_sample_method synthetic"]),
    ],
)
def test_bad_values_are_refused_by_name(values: dict, messages: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SpeculativeConfig.from_dict(values)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "error", "messages"),
    [
        ({"tensor_parallel_size": 1}, InvalidArgumentError, ["tensor_parallel_size is 1", "'draft_tensor_parallel_size'"]),
        ({"draft-tensor-parallel-size": 2}, UnsupportedError, ["draft_tensor_parallel_size is 2", "not built", "start more drafters"]),
        ({"draft_tensor_parallel_size": True}, UnsupportedError, ["draft_tensor_parallel_size is True"]),
        ({"temperature": 0.5}, InvalidArgumentError, ["temperature is 0.5", "sampling parameters of a request"]),
        ({"disable_by_batch_size": 8}, InvalidArgumentError, ["'num_speculative_tokens_per_batch_size'"]),
        ({"quantization": "fp8"}, UnsupportedError, ["quantization is 'fp8'", "not built", "name a checkpoint in the format"]),
        ({"enforce_eager": True}, InvalidArgumentError, ["use_cuda_graphs"]),
        ({"attention_backend": "flash_attn"}, InvalidArgumentError, ["attention_backend is 'flash_attn'"]),
        ({"target_model_config": {}}, InvalidArgumentError, ["made of other keys"]),
        ({"posterior_alpha": [0.3]}, InvalidArgumentError, ["accepted only where the text stays"]),
    ],
)
def test_keys_of_other_systems_are_refused_with_what_to_do_instead(values: dict, error: type[SpecwireError], messages: list[str]) -> None:
    with pytest.raises(error) as caught:
        SpeculativeConfig.from_dict(values)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [*((key, neutral) for key, foreign in FOREIGN_KEYS.items() for neutral in (None, *foreign.neutral))],
)
def test_keys_of_other_systems_that_ask_for_nothing_are_taken(key: str, value: object) -> None:
    assert SpeculativeConfig.from_dict({key: value}) == SpeculativeConfig()


def test_no_key_is_ours_and_foreign() -> None:
    assert not FOREIGN_KEYS.keys() & {field.name for field in dataclasses.fields(SpeculativeConfig)}


@pytest.mark.parametrize(
    ("text", "message"), [("{'method': 'ngram'}", "is no JSON"), ("", "is no JSON"), ("[]", "must be a mapping"), ("null", "must be a mapping")]
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecwireError, match=re.escape(message)):
        SpeculativeConfig.from_json(text)
