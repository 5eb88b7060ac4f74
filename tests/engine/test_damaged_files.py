"""Damaged files of models and of the cache, and no place for one: named, or made anew; never a traceback, and never another model."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwire.engine.cache_dir import remembered
from specwire.engine.checkpoint import resolve_model
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import load_model
from specwire.engine.models.weights import FORMAT_DTYPES
from specwire.errors import FailedPreconditionError, InvalidArgumentError
from specwire.tokenizer import Tokenizer
from tests.engine.gguf_writer import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "sizes.json"])
def test_a_damaged_conversion_is_made_anew(tmp_path, own_cache, caplog, name):
    """As a machine that lost its power leaves it, or somebody who tidied up."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    folder = resolve_model(str(path))
    good = (folder / "model.safetensors").read_bytes()
    (folder / name).write_bytes(b"")
    abandoned, recent = own_cache / "gguf" / ".converting-old", own_cache / "gguf" / ".converting-new"
    for scratch in (abandoned, recent):
        (scratch / "new").mkdir(parents=True)
        (scratch / "new" / "model.safetensors").write_bytes(b"written")
    # The folders of what is being written are as old.
    for old in (abandoned, abandoned / "new", abandoned / "new" / "model.safetensors", recent, recent / "new"):
        os.utime(old, (0, 0))
    assert resolve_model(str(path)) == folder
    assert (folder / "model.safetensors").read_bytes() == good
    assert f"{folder} is damaged and replaced" in caplog.text
    assert sorted(folder.parent.iterdir()) == [recent, folder], "what a conversion that was killed left goes, but not what is being made"


@pytest.mark.parametrize("is_mended", [False, True], ids=["moved away", "mended"])
def test_a_conversion_that_another_process_mends_at_the_same_time_is_left_whole(tmp_path, monkeypatch, caplog, is_mended):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    folder = resolve_model(str(path))
    good, other = (folder / "model.safetensors").read_bytes(), tmp_path / "other"
    shutil.copytree(folder, other)
    (folder / "model.safetensors").write_bytes(b"")
    rename = os.rename

    def after_the_other(source, destination):
        if Path(destination).name == "damaged":
            monkeypatch.setattr(os, "rename", rename)
            rename(folder, tmp_path / "moved")
            if is_mended:
                rename(other, folder)
                (folder / "of the other").touch()
        rename(source, destination)

    monkeypatch.setattr(os, "rename", after_the_other)
    assert resolve_model(str(path)) == folder
    assert (folder / "model.safetensors").read_bytes() == good
    assert (folder / "of the other").exists() == is_mended
    assert "is damaged" not in caplog.text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"another text", b"0" * 64 + b"\nvalue"])
def test_damaged_files_of_the_cache_are_replaced(own_cache, caplog, content):
    assert remembered("kind", "key", lambda: "value") == "value"
    [path] = (own_cache / "kind").iterdir()
    path.chmod(0o600)
    path.write_bytes(content)
    assert remembered("kind", "key", lambda: "new value") == "new value"
    assert f"the kind in {path} is damaged and replaced" in caplog.text
    assert remembered("kind", "key", lambda: "newer value") == "new value"


def test_a_damaged_file_is_named(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors can't be read as safetensors \(.*\); fetch or save the model again"):
        load_model(folder, torch.float32)


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)  # as it is for a user whom the system does not know
    with pytest.raises(FailedPreconditionError, match="has no home directory to keep a cache in; set XDG_CACHE_HOME"):
        remembered("kind", "key", lambda: "value")
    with pytest.raises(InvalidArgumentError, match=r"'~nobody/model' is no existing folder"):
        resolve_model("~nobody/model")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "message"), [(b"", "can't be read as JSON"), (b"\xff\xfe{}", "can't be read as JSON"), (b"[1]", "holds no JSON object")]
)
def test_a_damaged_json_file_is_named(tiny_folder, tmp_path, name, content, message):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=rf"{name} {message}.*; fetch or save it again"):
        load_model(folder, torch.float32) if name != "tokenizer_config.json" else Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size 'many', but it must be an integer from 1 to 16777216"),
        ({"num_attention_heads": -1}, "num_attention_heads -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"max_position_embeddings": 2.5}, r"max_position_embeddings 2\.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id of the model is '</s>', but must be a token id or a list of them"),
        ({"bos_token_id": [1, -1]}, r"bos_token_id of the model is \[1, -1\]"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "can't be understood"),
        ({"quantization_config": "gptq"}, "can't be understood"),
        ({"rms_norm_eps": []}, "can't be understood"),
    ],
)
def test_values_that_cannot_be_are_named(tiny_folder, changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ModelConfig.from_dict(json.loads((tiny_folder / "config.json").read_text()) | changes)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_a_model_that_runs_does_not_depend_on_its_files(tiny_folder, tmp_path, weights):
    """A file that is mapped into memory and written anew, as saving a model into the folder that is served from does, would change the model, or end
    the process."""
    folder, dtype = tmp_path / "model", FORMAT_DTYPES[weights]
    shutil.copytree(tiny_folder, folder)
    save_file({name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}, folder / "model.safetensors")
    model = load_model(folder, dtype, weights=weights)
    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert model.weights_format == weights


def test_damaged_4_bit_weights_are_named(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "q4").mkdir()
    (folder / "q4" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidArgumentError, match=r"q4/model\.safetensors can't be read"):
        load_model(folder, torch.float32)
