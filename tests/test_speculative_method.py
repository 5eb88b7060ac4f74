"""Which methods speculative_config names: by themselves, in lists, by a checkpoint, and what goes with each."""

import json
import re
from pathlib import Path

import pytest

from specwire.draft_checkpoint import HEAD_METHODS
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.speculative_config import SpeculativeConfig
from specwire.speculative_method import METHODS


@pytest.mark.parametrize(
    ("checkpoint", "method"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "draft_model"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["EAGLEModel"]}, "eagle"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"architectures": ["DeepSeekMTPModel"]}, "mtp"),
        ({"model_type": "qwen3_next_mtp"}, "mtp"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "draft_model"),  # no list: nothing is known
        ([], "draft_model"),
    ],
)
def test_the_method_follows_from_the_checkpoint_but_never_against_an_explicit_one(tmp_path: Path, checkpoint: object, method: str) -> None:
    folder = tmp_path / "eagle3-dspark"  # a path says nothing
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(checkpoint))
    if method in METHODS:
        assert SpeculativeConfig.from_dict({"model": str(folder)}).method == method
    else:
        with pytest.raises(UnsupportedError, match=f"model '.*' is a checkpoint for drafting with {method}, .* not built"):
            SpeculativeConfig.from_dict({"model": str(folder)})
    assert SpeculativeConfig.from_dict({"model": str(folder), "method": "draft_model"}).method == "draft_model"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_checkpoint_that_can_not_be_read_is_left_to_who_loads_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert SpeculativeConfig.from_dict({"model": str(tmp_path)}).method == "draft_model"


@pytest.mark.parametrize("method", ["deepseek_mtp", "medusa", "mlp_speculator", "ngram_gpu", "custom_class", "extract_hidden_states"])
def test_methods_that_are_not_built_are_named(method: str) -> None:
    with pytest.raises(UnsupportedError, match=f"method '{method}' is not built; use one of ngram, draft_model, suffix"):
        SpeculativeConfig.from_dict({"method": method})


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_a_head_names_its_model(method: str) -> None:
    config = SpeculativeConfig.from_dict({"method": method, "model": "some/head"})
    assert config.has_model
    assert SpeculativeConfig.from_json(config.to_json()) == config
    if method == "mtp":
        assert SpeculativeConfig(method=method).model is None, "the target's own layer"
        assert SpeculativeConfig.from_dict({"method": "mimo_mtp"}).method == "mtp"
        return
    with pytest.raises(InvalidArgumentError, match=f"method is {method}, but model is not set"):
        SpeculativeConfig(method=method)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab is true, but method is ngram; it is for draft_model"),
        ({"method": ["ngram", "suffix"], "use_heterogeneous_vocab": True}, "but method is ngram and suffix"),
        ({"method": None, "parallel_drafting": True}, "parallel_drafting is true, but method is null"),
        ({"method": "eagle3", "model": "head", "parallel_drafting": True}, "parallel_drafting is true, but method is eagle3"),
        ({"parallel_drafting": 1}, "parallel_drafting is 1, but must be true or false"),
        ({"method": "dflash", "model": "head", "dspark_draft_topk": 4}, "dspark_draft_topk is 4, but method is dflash"),
        ({"method": "dspark", "model": "head", "dspark_draft_topk": 0}, "dspark_draft_topk is 0, but must be an integer of 1 or more"),
    ],
)
def test_options_of_one_method_are_refused_with_another(values: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        SpeculativeConfig.from_dict(values)


def test_a_list_of_lookups_and_at_most_one_with_a_model_is_taken() -> None:
    config = SpeculativeConfig.from_dict({"method": ["suffix", "ngram"]})
    assert config.methods == ("suffix", "ngram")
    assert SpeculativeConfig.from_json(config.to_json()) == config
    assert (SpeculativeConfig().methods, SpeculativeConfig(method=None).methods) == (("ngram",), ())
    assert (config.has_model, config.model_method) == (False, None)
    config = SpeculativeConfig.from_dict({"method": ["suffix", "eagle3", "ngram"], "model": "some/head"})
    assert (config.has_model, config.model_method, config.model) == (True, "eagle3", "some/head")
    assert SpeculativeConfig.from_json(config.to_json()) == config
    assert SpeculativeConfig.from_dict({"method": ["ngram", "mimo_mtp"]}).model_method == "mtp"
    config = SpeculativeConfig.from_dict({"method": ["draft_model", "ngram"], "model": "a/b", "use_heterogeneous_vocab": True})
    assert config.use_heterogeneous_vocab
    for other in ("draft_model", "eagle3"):
        with pytest.raises(InvalidArgumentError, match=f"method is ngram and {other}, but model is not set"):
            SpeculativeConfig.from_dict({"method": ["ngram", other]})
    with pytest.raises(UnsupportedError, match="eagle3 and draft_model both have a model; a list has one of them at most, beside ngram and suffix"):
        SpeculativeConfig.from_dict({"method": ["eagle3", "ngram", "draft_model"], "model": "some/head"})
    with pytest.raises(UnsupportedError, match="'medusa' is not built"):
        SpeculativeConfig.from_dict({"method": ["ngram", "medusa"], "model": "some/head"})


@pytest.mark.parametrize(
    ("values", "unread"),
    [
        ({"method": "ngram", "prompt_lookup_max": 7, "prompt_lookup_min": 2}, []),
        ({"method": ["ngram", "suffix"], "prompt_lookup_max": 7, "suffix_decoding_max_tree_depth": 9}, []),
        ({"method": "suffix", "prompt_lookup_min": 2, "prompt_lookup_max": 4}, []),
        ({"method": None, "prompt_lookup_max": 7}, []),
        ({"method": "suffix", "prompt_lookup_min": 2, "prompt_lookup_max": 7}, ["prompt_lookup_max is 7, but suffix"]),
        (
            {"method": "ngram", "suffix_decoding_max_tree_depth": 9, "draft_sharpness": 0.5},
            ["suffix_decoding_max_tree_depth is 9", "draft_sharpness is 0.5"],
        ),
        ({"method": "draft_model", "model": "m", "draft_sharpness": 0.5}, []),
    ],
)
def test_options_that_no_method_reads_are_named(values: dict[str, object], unread: list[str]) -> None:
    found = SpeculativeConfig.from_dict(values).unread
    assert len(found) == len(unread)
    assert all(line.startswith(beginning) for line, beginning in zip(found, unread, strict=True)), found
