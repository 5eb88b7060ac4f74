"""What folders of heads say, by each format; and heads that are for another method, target or engine are refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwire.engine.features.pages import check_source, project
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.features import feature_source
from specwire.engine.heads.load import load_head
from specwire.engine.heads.markov import highest
from specwire.engine.heads.source import FINAL_LAYER
from specwire.engine.models.config import ModelConfig
from specwire.errors import InvalidArgumentError, SpecwireError, UnsupportedError
from tests.heads.checkpoints import HIDDEN, SHAPE, SUBSET, VOCAB, WRITERS, Checkpoint, speculators
from tests.heads.drafting import make_bench
from tests.heads.target import Target, true_features

TEXT = [(17 * i + 5) % VOCAB for i in range(40)]


@pytest.mark.parametrize("name", list(WRITERS))
def test_the_verifier_is_told_what_the_head_reads(target: Target, checkpoints: dict[str, Checkpoint], name: str) -> None:
    checkpoint, config = checkpoints[name], ModelConfig.from_folder(target.folder)
    source = feature_source(checkpoint.folder, config)
    check_source(source, config)
    states = target.states(TEXT)
    torch.testing.assert_close(
        project(source, [states[layer_id] for layer_id in source.layer_ids]), true_features(target, checkpoint, TEXT), atol=1e-4, rtol=1e-4
    )
    assert (source.name, source.width, source.dtype) == (name, HIDDEN, torch.float32)
    assert source.hash == load_head(checkpoint.folder, name.partition("_")[0], target=target.folder).source.hash


def test_a_whole_model_reads_no_features(target: Target) -> None:
    with pytest.raises(InvalidArgumentError, match="holds a whole model, not a draft head"):
        feature_source(target.folder, ModelConfig.from_folder(target.folder))


def test_features_are_told_apart(target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    config = ModelConfig.from_folder(target.folder)
    hashes = {name: feature_source(checkpoint.folder, config).hash for name, checkpoint in checkpoints.items()}
    assert len({hashes[name] for name in ("mtp_mimo", "mtp_speculators", "eagle_plain")}) == 1, "the same hidden state, as it is"
    different = {value for name, value in hashes.items() if not name.startswith(("mtp", "eagle_"))}
    assert len(different) == 8


@pytest.mark.parametrize(
    ("raw", "layer_ids"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "layer_ids": [9]}}, (1, 3, 4)),
        ({"eagle_config": {"layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, (2, 4)),
        ({"dspark_target_layer_ids": [0, 2], "target_layer_ids": [7]}, (1, 3)),
        ({"target_layer_ids": [0, 2]}, (1, 3)),
        ({}, (2, 2, 1)),
    ],
)
def test_layer_numbers_count_what_enters_a_layer(target: Target, raw: dict[str, Any], layer_ids: tuple[int, ...]) -> None:
    config = HeadConfig.from_dict({**SHAPE, "model_type": "llama", **raw}, "head", "eagle3")
    assert config.layer_ids_of(ModelConfig.from_folder(target.folder)) == layer_ids


def test_layer_numbers_that_the_target_does_not_have_are_refused(target: Target) -> None:
    config = ModelConfig.from_folder(target.folder)
    for key, ids in (("eagle_aux_hidden_state_layer_ids", [1, 5]), ("target_layer_ids", [4])):
        head = HeadConfig.from_dict({**SHAPE, "model_type": "llama", key: ids}, "head", "eagle3")
        with pytest.raises(InvalidArgumentError, match="head reads hidden states of layer 5, but the target has 4 layers"):
            head.check_target(config)
    with pytest.raises(InvalidArgumentError, match="names no layers of the target"):
        HeadConfig.from_dict({**SHAPE, "model_type": "llama"}, "head", "eagle3").layer_ids_of(None)


def test_methods_differ_in_what_a_missing_key_means() -> None:
    plain = HeadConfig.from_dict({**SHAPE, "model_type": "llama"}, "head", "eagle")
    assert (plain.method, plain.layer_ids, plain.num_draft_tokens, plain.draft_vocab_size) == ("eagle", (FINAL_LAYER,), None, VOCAB)
    library = HeadConfig.from_dict(speculators("eagle3", draft_vocab_size=100), "head")
    assert (library.method, library.num_draft_tokens, library.draft_vocab_size, library.target) == ("eagle3", 5, 100, "some/target")


def test_who_drafts_the_first_token_where_no_key_says_it(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    native, library = checkpoints["dspark_native"], checkpoints["dspark_speculators"]
    assert "sample_from_anchor" not in native.config
    assert load_head(native.folder, "dspark", target=target.folder).head.first_draft == 0
    assert load_head(library.folder, "dspark", target=target.folder).head.first_draft == 1
    folder = changed(library, tmp_path / "absent")
    (folder / "config.json").write_text(json.dumps({key: value for key, value in library.config.items() if key != "sample_from_anchor"}))
    assert load_head(folder, "dspark", target=target.folder).head.first_draft == 0
    assert load_head(checkpoints["dflash_speculators"].folder, "dflash", target=target.folder).head.first_draft == 1


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_checkpoint_of_another_method_is_refused_naming_both(target: Target, checkpoints: dict[str, Checkpoint], name: str) -> None:
    found = name.partition("_")[0]
    for method in ("eagle", "eagle3", "mtp", "dflash", "dspark"):
        if method != found:
            with pytest.raises(
                InvalidArgumentError, match=f"{name} is a checkpoint for method {found}, but method is {method}; set method to {found}"
            ):
                load_head(checkpoints[name].folder, method, target=target.folder)


def test_a_whole_model_is_no_head(target: Target) -> None:
    with pytest.raises(InvalidArgumentError, match="is a checkpoint for method draft_model, but method is eagle3"):
        load_head(target.folder, "eagle3", target=target.folder)


def changed(checkpoint: Checkpoint, folder: Path, drop: tuple[str, ...] = (), **keys: Any) -> Path:
    """A copy with other keys in its config.json, and without some tensors."""
    shutil.copytree(checkpoint.folder, folder)
    (folder / "config.json").write_text(json.dumps(checkpoint.config | keys))
    if drop:
        save_file({name: tensor for name, tensor in checkpoint.tensors.items() if name not in drop}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        ("eagle3_plain", {"target_hidden_size": 48}, InvalidArgumentError, "for a target with hidden size 48, but this target's is 64"),
        ("eagle3_plain", {"vocab_size": 300}, InvalidArgumentError, "for a target with vocabulary 300, but this target's is 259"),
        ("eagle3_plain", {"draft_vocab_size": 70}, InvalidArgumentError, r"tensor d2t has shape \(80,\), but its config.json asks for \(70,\)"),
        ("eagle3_plain", {"model_type": "gemma"}, UnsupportedError, "model_type 'gemma' is not supported"),
        ("eagle3_norm_before_fc", {"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedError, "use_aux_hidden_state false is not built"),
        ("eagle3_norm_before_fc", {"fc_norm": True}, InvalidArgumentError, "norm_before_fc and fc_norm are both true"),
        ("eagle3_norm_before_fc", {"norm_before_residual": "yes"}, InvalidArgumentError, "norm_before_residual is 'yes', but must be true or false"),
        ("eagle3_speculators", {"speculators_model_type": "peagle"}, UnsupportedError, "speculators_model_type is 'peagle', which is not built"),
        ("eagle3_speculators", {"transformer_layer_config": None}, InvalidArgumentError, "no transformer_layer_config"),
        ("eagle3_speculators", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, InvalidArgumentError, r"fc.weight has shape \(64, 192\)"),
        ("eagle3_speculators", {"eagle_aux_hidden_state_layer_ids": "all"}, InvalidArgumentError, "must be a list of layer numbers"),
        ("mtp_mimo", {"num_nextn_predict_layers": 3}, UnsupportedError, "num_nextn_predict_layers is 3, but only 1 is built"),
        ("dflash_speculators", {"sample_from_anchor": True}, UnsupportedError, "sample_from_anchor true is not built for dflash"),
        ("dflash_speculators", {"mask_token_id": None}, InvalidArgumentError, "has mask_token_id None, but dflash needs an integer"),
        ("dflash_speculators", {"mask_token_id": 259}, InvalidArgumentError, "mask_token_id is 259, but the vocabulary ends at 258"),
        ("dflash_speculators", {"block_size": 1}, InvalidArgumentError, "block_size is 1, but a block has at least 2 tokens"),
        ("dflash_plain", {"layer_types": ["sliding_attention", "full_attention"]}, UnsupportedError, "has layers of sliding_attention"),
        ("dspark_native", {"markov_head_type": "gated"}, UnsupportedError, "markov_head_type is 'gated', but only 'vanilla' is built"),
        ("dspark_native", {"markov_rank": 0}, InvalidArgumentError, "confidence_head_with_markov is true, but markov_rank is 0"),
        ("dspark_native", {"dspark_draft_topk": 260}, InvalidArgumentError, "dspark_draft_topk is 260, but the head drafts 259 ids"),
        ("dspark_native", {"confidence_temperatures": [0]}, InvalidArgumentError, "must be a list of numbers above 0"),
    ],
)
def test_what_is_not_computed_is_refused(
    target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path, name: str, keys: dict[str, Any], error: type[SpecwireError], message: str
) -> None:
    folder = changed(checkpoints[name], tmp_path / name, **keys)
    with pytest.raises(error, match=message):
        load_head(folder, name.partition("_")[0], target=target.folder)


def test_what_lacks_tensors_is_refused(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["eagle3_speculators"]
    with pytest.raises(InvalidArgumentError, match=r"has no tensor layers.0.self_attn.k_proj.weight, which a head of its kind needs"):
        load_head(changed(checkpoint, tmp_path / "a", ("layers.0.self_attn.k_proj.weight",)), "eagle3", target=target.folder)
    with pytest.raises(InvalidArgumentError, match=f"drafts {len(SUBSET)} ids of a vocabulary of {VOCAB}, but has no tensor d2t to say which"):
        load_head(changed(checkpoint, tmp_path / "b", ("d2t",)), "eagle3", target=target.folder)
    alone = changed(checkpoint, tmp_path / "c", ("embed_tokens.weight",))
    assert load_head(alone, "eagle3", target=target.folder).head.vocabulary.size == VOCAB
    with pytest.raises(InvalidArgumentError, match=r"has no tensor embed_tokens.weight: it shares the target's; name the target as target_model"):
        load_head(alone, "eagle3")
    (alone / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidArgumentError, match="its weights can't be read"):
        load_head(alone, "eagle3", target=target.folder)
    (alone / "model.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match=r"has no model.safetensors or pytorch_model.bin"):
        load_head(alone, "eagle3", target=target.folder)
    (alone / "config.json").write_text("[]")
    with pytest.raises(InvalidArgumentError, match="holds no JSON object"):
        HeadConfig.from_folder(alone)


def test_a_vocabulary_that_is_none_of_the_targets_is_refused(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    folder = changed(checkpoints["eagle3_speculators"], tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    for index, offset in ((-1, VOCAB), (0, -1), (1, tensors["d2t"][0].item() - 1)):
        wrong = tensors["d2t"].clone()
        wrong[index] = offset
        save_file(tensors | {"d2t": wrong}, folder / "model.safetensors")
        with pytest.raises(InvalidArgumentError, match="d2t does not give 80 different ids of 0 to 258"):
            load_head(folder, "eagle3", target=target.folder)


def test_more_drafts_than_a_block_has_are_refused(target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    for name, most in (("dspark_native", 5), ("dspark_speculators", 4), ("dflash_plain", 5), ("dflash_speculators", 4)):
        assert make_bench(target, checkpoints[name], max_num_drafts=most).method.description.max_num_draft_tokens == most
        with pytest.raises(InvalidArgumentError, match=f"num_speculative_tokens is {most + 1}, but the head .*{name} drafts blocks of {most}"):
            make_bench(target, checkpoints[name], max_num_drafts=most + 1)


def test_shards_and_formats_of_numbers(target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["eagle3_speculators"]
    folder = changed(checkpoint, tmp_path / "shards")
    (folder / "model.safetensors").unlink()
    names = sorted(checkpoint.tensors)
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: checkpoint.tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole, sharded = (load_head(each, "eagle3", target=target.folder, dtype="float32") for each in (checkpoint.folder, folder))
    rows = torch.randn(3, HIDDEN)
    assert torch.equal(whole.head.vocabulary.head(rows), sharded.head.vocabulary.head(rows))
    assert whole.source.hash == sharded.source.hash
    for weights in ("auto", "int8", "bf16"):
        assert load_head(folder, "eagle3", target=target.folder, weights=weights).dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="weights int4 is not built for draft heads"):
        load_head(folder, "eagle3", weights="int4")


def test_a_window_of_its_own(target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    folder = checkpoints["eagle3_speculators"].folder
    assert load_head(folder, "eagle3", target=target.folder).max_model_len == 256
    assert load_head(folder, "eagle3", target=target.folder, max_model_len=50).max_model_len == 50


def test_the_best_columns_are_found_by_groups() -> None:
    logits = torch.randn(5, 1003, generator=torch.Generator().manual_seed(1))
    for count in (1, 9, 40, 62, 63, 400):
        found = highest(logits, count)
        expected = logits.topk(count, dim=1)
        assert found.columns is not None
        assert torch.equal(found.logits, expected.values)
        assert torch.equal(found.columns, expected.indices)
